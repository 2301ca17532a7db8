# Evaluation of a policy on fixed held-out tasks.


rule evaluate:
    input:
        base=base_manifest,
        policy=lambda wildcards: PLAN.policy_manifest(
            *chain_of(wildcards), int(wildcards.iteration)
        ),
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
        iteration=lambda wildcards: int(wildcards.iteration),
        base=input_folder("base"),
        policy=input_folder("policy"),
        dataset=input_option("dataset", folder=True),
        out=output_folder("metrics"),
    shell:
        "{params.env} exec llmppo evaluate --settings {params.settings:q} --base {params.base:q}"
        " --policy {params.policy:q} {params.dataset} --iteration {params.iteration}"
        " --out {params.out:q} --log {log:q}"
