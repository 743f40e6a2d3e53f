"""One task with internet, one without."""


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"online": {"internet": True}, "offline": {"internet": False}}

    @staticmethod
    def get_permissions(t):
        return ["full_internet"] if t["internet"] else []

    @staticmethod
    def get_instructions(t):
        return "Look around."

    @staticmethod
    def score(t, submission):
        return float(submission)
