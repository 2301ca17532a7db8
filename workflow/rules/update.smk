# One PPO update: policy i-1 and the episodes it sampled give policy i. A replay takes those of another variant.


rule update:
    input:
        base=base_manifest,
        policy=previous_policy,
        rollouts=own_rollouts,
        evaluation=stop_evaluation,
    output:
        policy=whole(LAYOUT.policy("{variant}", "{seed}", "{iteration}")),
        advantages=LAYOUT.advantages("{variant}", "{seed}", "{iteration}"),
        metrics=LAYOUT.metrics("{variant}", "{seed}", "{iteration}"),
    log:
        LAYOUT.log("update", "{variant}", "{seed}", "{iteration}"),
    benchmark:
        LAYOUT.benchmark("update", "{variant}", "{seed}", "{iteration}")
    # Policy 0 comes from the critic warm-up.
    wildcard_constraints:
        variant=any_of(PLAN.sampled),
        iteration=PLAN.single,
    priority: keep_pace
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("update").threads
    resources:
        mem_mb=PLAN.resources("update").mem_mb,
        runtime=PLAN.resources("update").runtime,
        gpu=PLAN.resources("update").gpus,
        # Housekeeping, not a param: another `keep_every` must not rerun the chain.
        prune=prune_option,
    params:
        env=environment("update"),
        settings=settings("update"),
        code=code("update"),
        evaluation=input_option("evaluation"),
    shell:
        "{params.env} exec llmppo update --settings {params.settings:q} --base {input.base:q}"
        " --policy {input.policy:q} {params.evaluation} {resources.prune} --seed {wildcards.seed}"
        " --iteration {wildcards.iteration} --out {output.policy:q} --advantages {output.advantages:q}"
        " --metrics {output.metrics:q} --log {log:q} {input.rollouts:q}"


use rule update as replay with:
    wildcard_constraints:
        variant=any_of(PLAN.replays),
        iteration=r"(?!0000)\d\d\d\d+",
