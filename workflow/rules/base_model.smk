# The frozen base model, shared by everything that uses the same.


rule base_model:
    input:
        sources=lambda wildcards: from_outside(
            PLAN.base_model_sources(base_model_chain(wildcards)[0])
        ),
    output:
        manifest=whole(LAYOUT.base_model("{key}")),
    log:
        LAYOUT.shared_log("base_model", "{key}"),
    benchmark:
        LAYOUT.shared_benchmark("base_model", "{key}")
    priority: first
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("base_model").threads
    resources:
        mem_mb=PLAN.resources("base_model").mem_mb,
        runtime=PLAN.resources("base_model").runtime,
        gpu=PLAN.resources("base_model").gpus,
    params:
        env=environment("base_model"),
        settings=lambda wildcards: PLAN.settings_json(
            "base_model", base_model_chain(wildcards)[0]
        ),
        code=lambda wildcards: PLAN.code("base_model", base_model_chain(wildcards)[0]),
        seed=lambda wildcards: PLAN.base_seed(*base_model_chain(wildcards)),
        content=lambda wildcards: PLAN.base_model_content(
            base_model_chain(wildcards)[0]
        ),
    shell:
        "{params.env} exec llmppo base-model --settings {params.settings:q} --seed {params.seed}"
        " --out {output.manifest:q} --code {params.code} --log {log:q}"
