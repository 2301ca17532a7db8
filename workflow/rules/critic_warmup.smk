# Policy 0 of a chain: fresh adapters, and a critic fitted while the policy stands still.


rule critic_warmup:
    input:
        base=base_manifest,
        rollouts=lambda wildcards: PLAN.warmup_rollouts(*chain_of(wildcards)),
    output:
        policy=whole(LAYOUT.policy("{variant}", "{seed}", 0)),
        metrics=LAYOUT.warmup_metrics("{variant}", "{seed}"),
    log:
        LAYOUT.log("critic_warmup", "{variant}", "{seed}", "critic_warmup"),
    benchmark:
        LAYOUT.benchmark("critic_warmup", "{variant}", "{seed}", "critic_warmup")
    priority: first
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("critic_warmup").threads
    resources:
        mem_mb=PLAN.resources("critic_warmup").mem_mb,
        runtime=PLAN.resources("critic_warmup").runtime,
        gpu=PLAN.resources("critic_warmup").gpus,
    params:
        env=environment("critic_warmup"),
        settings=settings("critic_warmup"),
        code=code("critic_warmup"),
    shell:
        "{params.env} exec llmppo critic-warmup --settings {params.settings:q} --base {input.base:q}"
        " --seed {wildcards.seed} --out {output.policy:q} --metrics {output.metrics:q} --log {log:q}"
        " {input.rollouts:q}"
