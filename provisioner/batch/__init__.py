"""Many runs: a suite of tasks, agents and repetitions, one budget, one view, and a crash costs nothing."""
