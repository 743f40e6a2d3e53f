"""The smallest family: the score is the number that was submitted."""


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def get_instructions(t):
        return "Submit a number."

    @staticmethod
    def score(t, submission):
        return float(submission)
