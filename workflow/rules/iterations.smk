# Several iterations of a chain in one job (`iterations_per_job`): it writes what the rules `rollout` and `update`
# would, in one process. Those serve the iterations that no block has.

for BLOCK in PLAN.blocks:

    rule:
        name:
            BLOCK.name
        input:
            base=base_manifest,
            policy=start_of(BLOCK),
            dataset=dataset_manifest,
            evaluation=stop_evaluation_of(BLOCK),
        output:
            policies=[whole(CHAIN.policy(i)) for i in BLOCK.iterations],
            rollouts=[
                CHAIN.rollout(i, shard)
                for i in BLOCK.iterations
                for shard in BLOCK.shards
            ],
            advantages=[CHAIN.advantages(i) for i in BLOCK.iterations],
            metrics=[CHAIN.metrics(i) for i in BLOCK.iterations],
        log:
            LAYOUT.log("iterations", "{variant}", "{seed}", BLOCK.span),
        benchmark:
            LAYOUT.benchmark("iterations", "{variant}", "{seed}", BLOCK.span)
        wildcard_constraints:
            variant=any_of(BLOCK.variants),
        priority: max(PLAN.last - BLOCK.first, 0)
        conda:
            "../envs/llmppo.yaml"
        threads: PLAN.resources("iterations").threads
        resources:
            mem_mb=PLAN.resources("iterations").mem_mb,
            runtime=len(BLOCK.iterations)
            * len(BLOCK.shards)
            * PLAN.resources("iterations").runtime,
            gpu=PLAN.resources("iterations").gpus,
            # Housekeeping, as in `update`.
            prune=PLAN.prune_options(BLOCK),
        params:
            env=environment("iterations"),
            settings=settings("iterations"),
            code=code("iterations"),
            first=BLOCK.first,
            last=BLOCK.last,
            dataset=input_option("dataset"),
            evaluation=input_option("evaluation"),
            chain=lambda wildcards, output: str(Path(output.metrics[0]).parents[2]),
        shell:
            "{params.env} exec llmppo iterations --settings {params.settings:q} --base {input.base:q}"
            " {params.dataset} {params.evaluation} {resources.prune} --seed {wildcards.seed}"
            " --first {params.first} --last {params.last} --chain {params.chain:q}"
            " --code {params.code} --log {log:q}"
