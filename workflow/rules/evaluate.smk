# Evaluation of a policy on fixed held-out tasks.


rule evaluate:
    input:
        base=base_manifest,
        policy=own_policy,
        dataset=dataset_manifest,
    output:
        metrics=LAYOUT.evaluation_metrics("{variant}", "{seed}", "{iteration}"),
        episodes=[
            f"{LAYOUT.evaluation('{variant}', '{seed}', '{iteration}')}/{decoding}.parquet"
            for decoding in PLAN.experiment.evaluation.decoding
        ],
    log:
        LAYOUT.log("evaluate", "{variant}", "{seed}", "{iteration}"),
    benchmark:
        LAYOUT.benchmark("evaluate", "{variant}", "{seed}", "{iteration}")
    priority: keep_pace
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("evaluate").threads
    resources:
        mem_mb=PLAN.resources("evaluate").mem_mb,
        runtime=PLAN.resources("evaluate").runtime,
        gpu=PLAN.resources("evaluate").gpus,
    params:
        env=environment("evaluate"),
        settings=settings("evaluate"),
        code=code("evaluate"),
        dataset=input_option("dataset"),
        out=output_folder("metrics"),
    shell:
        "{params.env} exec llmppo evaluate --settings {params.settings:q} --base {input.base:q}"
        " --policy {input.policy:q} {params.dataset} --iteration {wildcards.iteration}"
        " --out {params.out:q} --code {params.code} --log {log:q}"
