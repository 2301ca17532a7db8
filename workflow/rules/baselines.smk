# Floors and bounds of the environment, such as random play: the lines that a learning curve is read against.


rule baselines:
    input:
        dataset=PLAN.dataset_manifest(PLAN.reference_variant),
    output:
        LAYOUT.baselines("{key}"),
    log:
        LAYOUT.shared_log("baselines", "{key}"),
    benchmark:
        LAYOUT.shared_benchmark("baselines", "{key}")
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("baselines").threads
    resources:
        mem_mb=PLAN.resources("baselines").mem_mb,
        runtime=PLAN.resources("baselines").runtime,
    params:
        env=environment("baselines"),
        settings=PLAN.settings_json("baselines", PLAN.reference_variant),
        code=PLAN.code("baselines", PLAN.reference_variant),
        dataset=input_option("dataset"),
    shell:
        "{params.env} exec llmppo baselines --settings {params.settings:q} {params.dataset}"
        " --out {output:q} --code {params.code} --log {log:q}"
