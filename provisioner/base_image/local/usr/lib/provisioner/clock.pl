#!/usr/bin/perl
# Sets the clock after a pause: while QEMU pauses this machine or the host sleeps, the machine's clocks stop. The real-time
# clock does not stop. It counts whole seconds, and root may set it, so it only shows that there was a pause. The host's
# answer then says how far the monotonic clock is behind. The answer is right whether or not that clock counts the pause:
# with KVM it counts the host's sleep, but not a pause of QEMU.
#
# The file $1 holds the last answer, so a program that systemd starts again continues from there. /run does not outlive a
# boot: without the file, the clock is set to the host's time.
use strict;

require((__FILE__ =~ m{\A(.*/)})[0] . 'host.pl');
our ($CLOCK_REALTIME, $CLOCK_MONOTONIC);
my ($record) = @ARGV;
# Not a whole second, so that each look falls into another part of the real-time clock's second. Ten looks then tell the
# time to a tenth of a second.
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
    my $offset = host_offset(5);    # within a second suffices
    close_port();
    return $offset;
}

# Returns the last recorded answer; undef if there is none.
sub recorded {
    open my $file, '<', $record or return undef;
    my $offset = <$file> // '';
    return $offset =~ /\A(-?\d{1,19})\n\z/ ? $1 : undef;
}

sub record {
    my ($offset) = @_;
    open my $file, '>', "$record.new" or die "$record.new: $!\n";
    printf $file "%d\n", $offset;
    close $file or die "$record.new: $!\n";
    rename "$record.new", $record or die "$record: $!\n";
}

my $offset = recorded();
my ($least, $most);
while (1) {
    # Look before asking, so that the next look shows a pause that comes after the answer.
    my ($at_least, $at_most) = look();
    if (defined $least && $at_least <= $most && $at_most >= $least) {
        $least = $at_least if $at_least > $least;
        $most = $at_most if $at_most < $most;
    }
    elsif (defined(my $told = ask_host())) {
        # Root may have set the clock to another time, which it then keeps, or to the right time a moment ago.
        my $ahead = nanoseconds($CLOCK_REALTIME) - nanoseconds($CLOCK_MONOTONIC);
        my $keeps = defined $offset && abs($ahead - $told) >= 1_000_000_000;
        set_clock($keeps ? $told + $ahead - $offset : $told);
        record($told);
        ($offset, $least, $most) = ($told, $at_least, $at_most);
    }
    pause($PAUSE_SECONDS);
}
