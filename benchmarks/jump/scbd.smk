# Append to rules/correct.smk of the workflow, and add "scbd" to METHODS in its Snakefile.
rule scbd:
    input:
        data="outputs/{scenario}/{pipeline}.parquet",
        script="scripts/correct_with_scbd.py",
    output:
        "outputs/{scenario}/{pipeline}_scbd.parquet",
    log:
        "logs/{scenario}/{pipeline}_scbd.log",
    conda:
        "../envs/scbd.yaml"
    params:
        batch_key=config["batch_key"],
        label_key=config["label_key"],
        smoketest=config.get("smoketest", 0),
    shell:
        "python {input.script} {input.data} '{params.batch_key}' {params.label_key} {output} --smoketest={params.smoketest} &> {log}"
