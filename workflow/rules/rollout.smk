# Episodes. An iteration's episodes are split into logical shards of fixed size; how many shards run at
# once is Snakemake's business, so results depend on neither cores nor nodes.


rule rollout:
    input:
        base=base_manifest,
        policy=previous_policy,
        dataset=dataset_manifest,
    output:
        LAYOUT.rollout("{variant}", "{seed}", "{iteration}", "{shard}"),
    log:
        LAYOUT.log("rollout", "{variant}", "{seed}", "{iteration}-{shard}"),
    benchmark:
        LAYOUT.benchmark("rollout", "{variant}", "{seed}", "{iteration}-{shard}")
    wildcard_constraints:
        iteration=PLAN.single,
    priority: keep_pace
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("rollout").threads
    resources:
        mem_mb=PLAN.resources("rollout").mem_mb,
        runtime=PLAN.resources("rollout").runtime,
        gpu=PLAN.resources("rollout").gpus,
    params:
        env=environment("rollout"),
        settings=settings("rollout"),
        code=code("rollout"),
        dataset=input_option("dataset"),
    shell:
        "{params.env} exec llmppo rollout --settings {params.settings:q} --base {input.base:q}"
        " --policy {input.policy:q} {params.dataset} --seed {wildcards.seed} --split train"
        " --iteration {wildcards.iteration} --shard {wildcards.shard} --out {output:q}"
        " --code {params.code} --log {log:q}"


rule warmup_rollout:
    input:
        base=lambda wildcards: PLAN.base_manifest(*warmup_chain(wildcards)),
        dataset=lambda wildcards: PLAN.dataset_manifest(warmup_chain(wildcards)[0]),
    output:
        LAYOUT.warmup_rollout("{key}", "{step}", "{shard}"),
    log:
        LAYOUT.shared_log("warmup_rollout", "{key}-{step}-{shard}"),
    benchmark:
        LAYOUT.shared_benchmark("warmup_rollout", "{key}-{step}-{shard}")
    priority: first
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("rollout").threads
    resources:
        mem_mb=PLAN.resources("rollout").mem_mb,
        runtime=PLAN.resources("rollout").runtime,
        gpu=PLAN.resources("rollout").gpus,
    params:
        env=environment("rollout"),
        settings=lambda wildcards: PLAN.settings_json(
            "rollout", warmup_chain(wildcards)[0]
        ),
        code=lambda wildcards: PLAN.code("rollout", warmup_chain(wildcards)[0]),
        seed=lambda wildcards: warmup_chain(wildcards)[1],
        dataset=input_option("dataset"),
    shell:
        "{params.env} exec llmppo rollout --settings {params.settings:q} --base {input.base:q}"
        " {params.dataset} --seed {params.seed} --split warmup"
        " --iteration {wildcards.step} --shard {wildcards.shard} --out {output:q}"
        " --code {params.code} --log {log:q}"
