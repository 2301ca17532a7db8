# Turn-level PPO for language models. This file only composes; each stage has its rule file.
#
# `snakemake --cores 2` runs config/config.yaml; `--configfile FILE` runs exactly that file instead;
# `--config results=DIR` chooses another output root. `llmppo run` adds a lock, progress and resuming.

from snakemake.utils import min_version

min_version("9.27")


# A config file given on the command line replaces the default one: two experiments must not mix.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/dataset.smk"
include: "workflow/rules/base_model.smk"
include: "workflow/rules/baselines.smk"
include: "workflow/rules/rollout.smk"
include: "workflow/rules/critic_warmup.smk"
include: "workflow/rules/update.smk"
include: "workflow/rules/iterations.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/track.smk"
include: "workflow/rules/notebooks.smk"


localrules:
    all,
    variant_config,
    mlflow_init,
    notebooks,


rule all:
    default_target: True
    input:
        list(PLAN.targets()),
