# What a chain leaves for others: its resolved config, and its last policy as adapter and merged model.


rule variant_config:
    output:
        LAYOUT.config("{variant}", "{seed}"),
    log:
        LAYOUT.log("variant_config", "{variant}", "{seed}", "variant_config"),
    benchmark:
        LAYOUT.benchmark("variant_config", "{variant}", "{seed}", "variant_config")
    priority: first
    conda:
        "../envs/llmppo.yaml"
    threads: 1
    resources:
        mem_mb=500,
        runtime=5,
    params:
        env=environment("variant_config"),
        settings=lambda wildcards: PLAN.chain_file(*chain_of(wildcards)),
    shell:
        "{params.env} exec llmppo variant-config --settings {params.settings:q} --out {output:q}"
        " --log {log:q}"


rule export:
    input:
        base=base_manifest,
        policy=last_policy,
        config=rules.variant_config.output[0],
        metrics=lambda wildcards: PLAN.measured(*chain_of(wildcards)),
    output:
        manifest=whole(LAYOUT.export("{variant}", "{seed}")),
    log:
        LAYOUT.log("export", "{variant}", "{seed}", "export"),
    benchmark:
        LAYOUT.benchmark("export", "{variant}", "{seed}", "export")
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("export").threads
    resources:
        mem_mb=PLAN.resources("export").mem_mb,
        runtime=PLAN.resources("export").runtime,
        gpu=PLAN.resources("export").gpus,
    params:
        env=environment("export"),
        settings=settings("export"),
        code=code("export"),
        run_dir=input_folder("config"),
    shell:
        "{params.env} exec llmppo export --settings {params.settings:q} --base {input.base:q}"
        " --policy {input.policy:q} --run-dir {params.run_dir:q} --out {output.manifest:q} --log {log:q}"
