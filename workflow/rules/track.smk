# The MLflow mirror of a chain. The files are the truth; a tracker that is down costs no training.


rule mlflow_init:
    output:
        LAYOUT.mlflow_ready("{key}"),
    log:
        LAYOUT.shared_log("mlflow_init", "{key}"),
    benchmark:
        LAYOUT.shared_benchmark("mlflow_init", "{key}")
    conda:
        "../envs/llmppo.yaml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
        mlflow=1,
    params:
        env=environment("mlflow_init"),
        uri=PLAN.tracking_uri,
    shell:
        "{params.env} exec llmppo mlflow-init --uri {params.uri:q} --out {output:q} --log {log:q}"


# The default store is a file of the machine that Snakemake runs on.
if STORED and PLAN.experiment.tracking.uri is None:

    localrules:
        track,


# One writer at a time (`mlflow=1`): a sqlite store serves no more.
rule track:
    input:
        ready=LAYOUT.mlflow_ready(PLAN.tracking_key),
        metrics=lambda wildcards: PLAN.measured(*chain_of(wildcards)),
        transcripts=lambda wildcards: PLAN.transcripts(*chain_of(wildcards)),
        config=LAYOUT.config("{variant}", "{seed}"),
        export=PLAN.watched(LAYOUT.export("{variant}", "{seed}")),
        # Only waited for: a new seed changes the figures, but not what the other chains log.
        report=ancient(LAYOUT.report),
    output:
        marker=LAYOUT.tracked("{variant}", "{seed}"),
        page=LAYOUT.run_page("{variant}", "{seed}"),
    log:
        LAYOUT.log("track", "{variant}", "{seed}", "track"),
    benchmark:
        LAYOUT.benchmark("track", "{variant}", "{seed}", "track")
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("track").threads
    resources:
        mem_mb=PLAN.resources("track").mem_mb,
        runtime=PLAN.resources("track").runtime,
        mlflow=1,
    params:
        env=environment("track"),
        settings=settings("track"),
        code=code("track"),
        experiment=PLAN.experiment.name,
        uri=PLAN.tracking_uri,
        run_dir=input_folder("config"),
    shell:
        "{params.env} exec llmppo track --settings {params.settings:q} --experiment {params.experiment:q}"
        " --variant {wildcards.variant:q} --seed {wildcards.seed} --run-dir {params.run_dir:q}"
        " --uri {params.uri:q} --out {output.marker:q} --log {log:q}"
