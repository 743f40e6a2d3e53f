"""The group `batch`, with a module for each of its commands, and what they share."""

from provisioner.cli.commands.batch import cancel, export, plan, report, resume, run, schema, status, worker

COMMANDS = {
    "run": (run.main, "Run a suite to its end."),
    "plan": (plan.main, "Show what a suite would run, and what it costs at most. Creates nothing."),
    "status": (status.main, "Show how far a batch has come; without one, list all."),
    "resume": (resume.main, "Continue a batch that was interrupted, killed or cancelled."),
    "cancel": (cancel.main, "Start no more runs of a batch; with --force, stop the active ones."),
    "report": (report.main, "Write a batch's report: one HTML page."),
    "export": (export.main, "Write a batch's results in another program's format."),
    "worker": (worker.main, "Work on the runs of all batches in a shared database, until interrupted."),
    "schema": (schema.main, "Print the JSON Schema of suite files."),
}
