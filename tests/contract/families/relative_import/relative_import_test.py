import pytest

from .relative_import import TaskFamily

pytest_plugins = "metr-task-standard"


def test_the_words_own_scorer(task_family, task_name, task):
    assert task_name == "main"
    assert task_family.score(task, "abandon") == TaskFamily.score(task, "abandon") == 1.0


@pytest.mark.task_standard_tasks(["another"])
def test_for_another_task():
    raise AssertionError
