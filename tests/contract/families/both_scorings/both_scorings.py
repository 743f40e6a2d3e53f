"""A family with score() and intermediate_score(), as METR's own test families have: score() is the end score."""


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks() -> dict[str, dict[str, str]]:
        return {"main": {}}

    @staticmethod
    def get_instructions(t: dict[str, str]) -> str:
        return "Submit a number."

    @staticmethod
    def intermediate_score(t: dict[str, str]) -> dict[str, object]:
        return {"score": 0.1, "message": {"hint": "in between"}}

    @staticmethod
    def score(t: dict[str, str], submission: str) -> float:
        return float(submission)
