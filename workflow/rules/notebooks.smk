# The notebooks, run on the experiment: `llmppo run notebooks`, or `snakemake --cores 2 notebooks`.

NOTEBOOKS = Path(workflow.current_basedir).parents[1] / "notebooks"


rule notebook:
    input:
        notebook=local(str(NOTEBOOKS / "{notebook}.ipynb")),
        report=LAYOUT.report,
    output:
        LAYOUT.notebook("{notebook}"),
    log:
        f"{LAYOUT.root}/logs/notebook/{{notebook}}.log",
    benchmark:
        f"{LAYOUT.root}/benchmarks/notebook/{{notebook}}.tsv"
    conda:
        "../envs/llmppo.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        env=environment("notebook"),
        results=lambda wildcards, output: str(Path(output[0]).parents[1]),
    shell:
        "{params.env} exec papermill {input.notebook:q} {output:q} --parameters results {params.results:q}"
        " --kernel python3 --no-progress-bar > {log:q} 2>&1"


rule notebooks:
    input:
        [LAYOUT.notebook(path.stem) for path in sorted(NOTEBOOKS.glob("*.ipynb"))],
