# One PPO update: policy i-1 and the episodes it sampled give policy i.


rule update:
    input:
        base=base_manifest,
        policy=previous_policy,
        rollouts=lambda wildcards: PLAN.rollouts(
            *chain_of(wildcards), int(wildcards.iteration)
        ),
        evaluation=lambda wildcards: PLAN.stop_evaluation(
            *chain_of(wildcards), int(wildcards.iteration)
        ),
    output:
        policy=f"{LAYOUT.policy('{variant}', '{seed}', '{iteration}')}/manifest.json",
        advantages=LAYOUT.advantages("{variant}", "{seed}", "{iteration}"),
        metrics=LAYOUT.metrics("{variant}", "{seed}", "{iteration}"),
    log:
        LAYOUT.log("update", "{variant}", "{seed}", "{iteration}"),
    benchmark:
        LAYOUT.benchmark("update", "{variant}", "{seed}", "{iteration}")
    # Policy 0 comes from the critic warm-up.
    wildcard_constraints:
        iteration=r"(?!0000)\d\d\d\d+",
    priority: keep_pace
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("update").threads
    resources:
        mem_mb=PLAN.resources("update").mem_mb,
        runtime=PLAN.resources("update").runtime,
        gpu=PLAN.resources("update").gpus,
        # Housekeeping, not a param: another `keep_every` must not rerun the chain.
        prune=lambda wildcards: PLAN.prune_option(int(wildcards.iteration)),
    params:
        env=environment("update"),
        settings=settings("update"),
        code=code("update"),
        iteration=lambda wildcards: int(wildcards.iteration),
        base=input_folder("base"),
        policy=input_folder("policy"),
        evaluation=input_option("evaluation"),
        out=output_folder("policy"),
    shell:
        "{params.env} exec llmppo update --settings {params.settings:q} --base {params.base:q}"
        " --policy {params.policy:q} {params.evaluation} {resources.prune} --seed {wildcards.seed}"
        " --iteration {params.iteration} --out {params.out:q} --advantages {output.advantages:q}"
        " --metrics {output.metrics:q} --log {log:q} {input.rollouts:q}"
