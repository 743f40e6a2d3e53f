"""Tests of the family, run as root in a started environment: `provisioner test examples/word_count table`."""

import json
import pathlib

import pytest
from word_count import STORY, WORDS

RIGHT = """\
| word   |   count |
|--------|---------|
| the    |      19 |
| ships  |       6 |
| keeper |       5 |
"""


def test_the_agent_is_given_the_story():
    story = json.loads(pathlib.Path("/home/agent/story.json").read_text())
    assert story == {"story": STORY.read_text()}


@pytest.mark.task_standard_tasks(["total"])
def test_the_number_of_words_scores_1_and_another_0(task_family, task):
    right = len(WORDS.read_text().split())
    assert task_family.score(task, f"{right}\n") == 1.0
    assert task_family.score(task, str(right + 1)) == 0.0


@pytest.mark.task_standard_tasks(["longest"])
def test_the_longest_word_scores_1_and_another_0(task_family, task):
    assert task_family.score(task, "oceanography") == 1.0
    assert task_family.score(task, "ships") == 0.0


@pytest.mark.task_standard_tasks(["table"])
def test_each_right_row_scores_a_third(task_family, task):
    assert task_family.score(task, RIGHT) == 1.0
    assert task_family.score(task, RIGHT.replace("keeper", "lamp  ")) == pytest.approx(2 / 3)


def test_an_empty_submission_scores_nothing(task_family, task):
    assert task_family.score(task, "") == 0.0
