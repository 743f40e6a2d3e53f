#!/usr/bin/perl
# Sets the clock after this machine stood still: while QEMU pauses a machine or the host sleeps, the machine's clocks stop.
# The real-time clock does not. It counts seconds, and root may set it, so it only shows that there was a standstill. The
# host's answer says by how much the monotonic clock is behind since. That is right whatever this clock counts: with KVM
# it counts the host's sleep, and no pause.
use strict;

require((__FILE__ =~ m{\A(.*/)})[0] . 'host.pl');
our ($CLOCK_REALTIME, $CLOCK_MONOTONIC);
# Not a whole second: so each look comes at another part of the real-time clock's second, and ten looks tell its tenth.
my $PAUSE_SECONDS = 1.1;

# Returns the least and the most by which the real-time clock can be ahead of the monotonic one, in nanoseconds.
sub look {
    my $before = nanoseconds($CLOCK_MONOTONIC);
    my $seconds = rtc();
    my $after = nanoseconds($CLOCK_MONOTONIC);
    return ($seconds * 1_000_000_000 - $after, ($seconds + 1) * 1_000_000_000 - $before);
}

sub ask_host {
    open_port();
    my $offset = host_offset();
    close_port();
    return $offset;
}

my $offset;
until (defined($offset = ask_host())) { pause($PAUSE_SECONDS) }
my ($least, $most) = look();
while (1) {
    pause($PAUSE_SECONDS);
    my ($at_least, $at_most) = look();
    if ($at_least <= $most && $at_most >= $least) {
        $least = $at_least if $at_least > $least;
        $most = $at_most if $at_most < $most;
    }
    elsif (defined(my $told = ask_host())) {
        # Somebody may have set the clock to another time, which it then keeps, or to the right one a moment ago.
        my $ahead = nanoseconds($CLOCK_REALTIME) - nanoseconds($CLOCK_MONOTONIC);
        set_clock(abs($ahead - $told) < 1_000_000_000 ? $told : $told + $ahead - $offset);
        ($offset, $least, $most) = ($told, $at_least, $at_most);
    }
}
