"""Two tasks of one image, one of which asks for a larger disk."""


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"small": {}, "large": {}}

    @staticmethod
    def get_instructions(t):
        return "Nothing to do."

    @staticmethod
    def score(t, submission):
        return 1.0
