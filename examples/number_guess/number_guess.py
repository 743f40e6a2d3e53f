"""Guess a number, and learn after each guess whether it was too low or too high: intermediate scoring."""

import math
import pathlib

GUESS = pathlib.Path("/home/agent/guess.txt")


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"easy": {"number": 42}, "hard": {"number": 7919}}

    @staticmethod
    def get_instructions(t):
        return "Write a whole number into ~/guess.txt. Each intermediate score says whether it is too low or too high."

    @staticmethod
    def intermediate_score(t):
        try:
            guess = int(GUESS.read_text()[:20])
        except (OSError, ValueError):
            return {"score": math.nan, "message": {"guess": "no whole number in ~/guess.txt"}, "details": {}}
        distance = abs(guess - t["number"])
        word = "right" if distance == 0 else "too low" if guess < t["number"] else "too high"
        return {"score": 1 / (1 + distance), "message": {"guess": word}, "details": {"distance": distance}}

    @staticmethod
    def aggregate_scores(t, score_log):
        scores = [entry["score"] for entry in score_log if entry["score"] is not None]
        return max((score for score in scores if not math.isnan(score)), default=0.0)
