"""A family whose tasks and variables its text does not tell: its image does."""

NAMES = ["small", "smart"]


class TaskFamily:
    standard_version = "0.5.0"
    required_environment_variables = sorted(name for name in ("GIVEN", "TOKEN_A", "TOKEN_B"))

    @staticmethod
    def get_tasks():
        return {name: {} for name in sorted(NAMES)}

    @staticmethod
    def get_instructions(t):
        return "Submit a number."

    @staticmethod
    def score(t, submission):
        return float(submission)
