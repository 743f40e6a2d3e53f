import os

import pytest


def test_the_plugin_gives_family_and_task(task_family, task_name, task):
    assert task_name == "pair"
    assert task == task_family.get_tasks()["pair"]


def test_all_variables_are_there():
    assert os.environ["LAB_TOKEN"]
    assert os.environ["LAB_OTHER"]


@pytest.mark.task_standard_tasks(["another"])
def test_for_another_task():
    raise AssertionError("this must be skipped")
