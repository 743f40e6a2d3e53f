pytest_plugins = "metr-task-standard"


def test_both_scorings(task_family, task):
    assert task_family.score(task, "0.5") == 0.5
    assert task_family.intermediate_score(task)["score"] == 0.1
