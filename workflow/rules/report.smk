# The report of the whole experiment: one HTML file, figures, and a table.


rule report:
    input:
        metrics=[path for chain in PLAN.chains for path in PLAN.measured(*chain)],
        transcripts=[path for chain in PLAN.chains for path in PLAN.transcripts(*chain)],
        baselines=PLAN.baselines_file(),
    output:
        html=report(
            LAYOUT.report,
            caption="../report/report.rst",
            category="Experiment",
            labels={"experiment": PLAN.experiment.name, "content": "report"},
        ),
        rollouts=report(
            LAYOUT.rollouts_page,
            caption="../report/rollouts.rst",
            category="Experiment",
            labels={"experiment": PLAN.experiment.name, "content": "rollouts"},
        ),
        figure=report(
            LAYOUT.figure,
            caption="../report/learning_curve.rst",
            category="Experiment",
            labels={"experiment": PLAN.experiment.name, "content": "learning curve"},
        ),
        table=report(
            LAYOUT.summary_table,
            caption="../report/summary.rst",
            category="Experiment",
            labels={"experiment": PLAN.experiment.name, "content": "summary table"},
        ),
    log:
        f"{LAYOUT.root}/logs/report.log",
    benchmark:
        f"{LAYOUT.root}/benchmarks/report.tsv"
    conda:
        "../envs/llmppo.yaml"
    threads: PLAN.resources("report").threads
    resources:
        mem_mb=PLAN.resources("report").mem_mb,
        runtime=PLAN.resources("report").runtime,
        # A choice of links, not a param: another tracker must not redo the report.
        tracked="--tracked" if PLAN.experiment.tracking.mlflow else "",
    params:
        env=environment("report"),
        settings=PLAN.settings_json("report"),
        code=PLAN.code("report"),
        results=lambda wildcards, output: str(Path(output.html).parents[1]),
    shell:
        "{params.env} exec llmppo report --settings {params.settings:q} --results {params.results:q}"
        " --baselines {input.baselines:q} --out {output.html:q} {resources.tracked} --log {log:q}"
