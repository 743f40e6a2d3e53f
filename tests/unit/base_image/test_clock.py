"""Tests the program that sets a machine's clock after a pause, with simulated clocks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "provisioner/base_image/local/usr/lib/provisioner/clock.pl"
RECORD = "offset"
# Takes host.pl's place. Each argument after the first names a moment, and says what happens then: "before" the program
# starts, when the host has just "answered" for the first time, or in the pause with that number. Prints by how many
# seconds the clock is behind before each pause.
CLOCKS = r"""
use strict;
our ($CLOCK_REALTIME, $CLOCK_MONOTONIC) = (0, 1);
my ($host, $monotonic, $rtc_behind, $silent) = (1_700_000_000_250_000_000, 5_000_000_000, 370_000_000, 0);
my ($ahead, $pauses) = ($host - $monotonic, 0);
my %events = map { split /:/, $_, 2 } @ARGV[1 .. $#ARGV];
happen('before');

sub nanoseconds { return $monotonic + ($_[0] == $CLOCK_REALTIME ? $ahead : 0) }
sub rtc { return int(($host - $rtc_behind) / 1_000_000_000) }
sub open_port { }
sub close_port { happen('answered') }
sub host_offset { return $silent-- > 0 ? undef : $host - $monotonic }
sub set_clock { $ahead = $_[0] }

sub pause {
    printf "%.3f\n", ($host - $monotonic - $ahead) / 1e9;
    exit if ++$pauses > 30;
    $host += $_[0] * 1e9;
    $monotonic += $_[0] * 1e9;
    happen($pauses);
}

sub happen {
    for my $event (split /,/, delete $events{$_[0]} // '') {
        my ($what, $seconds) = split /=/, $event;
        $host += $seconds * 1e9 if $what eq 'stands' or $what eq 'sleeps';
        $monotonic += $seconds * 1e9 if $what eq 'sleeps';
        $ahead += $seconds * 1e9 if $what eq 'set';
        $rtc_behind -= $seconds * 1e9 if $what eq 'rtc';
        $silent = $seconds if $what eq 'silent';
    }
}
1;
"""


def behind(directory: Path, *events: str) -> list[float]:
    """Runs the program, and returns by how many seconds the clock is behind before each of its pauses."""
    shutil.copy(PROGRAM, directory)
    (directory / "host.pl").write_text(CLOCKS)
    argv = ["perl", str(directory / PROGRAM.name), str(directory / RECORD), *events]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return [float(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        (["3:stands=60", "9:stands=1.5", "14:stands=86400"], [0] * 31),
        (["3:sleeps=60"], [0] * 31),
        (["3:set=-1000", "6:stands=60", "9:rtc=-1000", "12:stands=60"], [0] * 3 + [1000] * 28),
        (["3:set=-1000,stands=60"], [0] * 3 + [1000] * 28),
        (["3:stands=60,set=60", "9:stands=0.9,set=0.9"], [0] * 31),
        (["3:stands=60,silent=2"], [0] * 3 + [60] * 2 + [0] * 26),
        (["before:stands=60", "9:stands=60"], [0] * 31),
        (["answered:stands=60"], [60] + [0] * 30),
        (["before:stands=60,silent=2"], [60] * 2 + [0] * 29),
    ],
    ids=[
        "pauses", "counted-pause", "set", "set-in-a-pause", "set-right", "silent-host", "behind-at-first",
        "pause-after-the-first-answer", "silent-at-first",
    ],
)  # fmt: skip
def test_a_pause_is_made_up_for_at_the_first_look_and_a_clock_that_was_set_keeps_its_time(
    tmp_path: Path, events: list[str], seen: list[float]
) -> None:
    assert behind(tmp_path, *events) == seen


def test_a_short_pause_is_seen_within_ten_looks(tmp_path: Path) -> None:
    seen = behind(tmp_path, "12:stands=0.3")
    assert set(seen) == {0, 0.3}
    assert seen[22:] == [0] * 9


def test_a_restarted_program_repairs_the_clock(tmp_path: Path) -> None:
    behind(tmp_path)
    assert behind(tmp_path, "before:stands=60") == [0] * 31


def test_a_restarted_program_keeps_the_time_of_the_clock(tmp_path: Path) -> None:
    behind(tmp_path)
    assert behind(tmp_path, "before:set=-1000,stands=60", "9:stands=60") == [1000] * 31


@pytest.mark.parametrize("record", ["", "17000\x00", "nonsense"], ids=["empty", "binary", "text"])
def test_a_damaged_record_counts_as_none(tmp_path: Path, record: str) -> None:
    (tmp_path / RECORD).write_text(record)
    assert behind(tmp_path, "before:stands=60") == [0] * 31
