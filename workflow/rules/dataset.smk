# Rows of a dataset environment, shared by everything that uses the same.


rule dataset:
    input:
        sources=lambda wildcards: from_outside(
            PLAN.dataset_sources(dataset_variant(wildcards))
        ),
    output:
        manifest=whole(LAYOUT.dataset("{key}")),
    log:
        LAYOUT.shared_log("dataset", "{key}"),
    benchmark:
        LAYOUT.shared_benchmark("dataset", "{key}")
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("dataset").threads
    resources:
        mem_mb=PLAN.resources("dataset").mem_mb,
        runtime=PLAN.resources("dataset").runtime,
    params:
        env=environment("dataset"),
        settings=lambda wildcards: PLAN.settings_json(
            "dataset", dataset_variant(wildcards)
        ),
        code=lambda wildcards: PLAN.code("dataset", dataset_variant(wildcards)),
        content=lambda wildcards: PLAN.dataset_content(dataset_variant(wildcards)),
    shell:
        "{params.env} exec llmppo dataset --settings {params.settings:q} --out {output.manifest:q}"
        " --code {params.code} --log {log:q}"
