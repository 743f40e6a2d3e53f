# This machine's clocks, and how it asks its host, on the virtio-serial port. The question is one byte: "?" for the
# credentials, "t" for the time; "." says that the machine has both. The host answers "KIND LENGTH\n" and so many bytes.
# Only what perl-base has: it is part of every Debian, and quick to start without KVM.
use strict;

my $MAXIMUM_BYTES = 1 << 20;
my $O_RDWR_NONBLOCK = 0x802;    # linux/fcntl.h: O_RDWR | O_NONBLOCK
my ($SYS_CLOCK_SETTIME, $SYS_CLOCK_GETTIME) = (227, 228);    # asm/unistd_64.h
our ($CLOCK_REALTIME, $CLOCK_MONOTONIC) = (0, 1);
my ($port, $buffer) = (undef, '');

# Opens the port. The driver creates it a moment after the system starts, and it can be open only once.
sub open_port {
    until (sysopen $port, (glob '/dev/vport*p1')[0] // '', $O_RDWR_NONBLOCK) { select undef, undef, undef, 0.02 }
}

sub close_port {
    close $port;
}

sub ask {
    my ($question) = @_;
    syswrite $port, $question;
}

# Reads what there is, waiting at most so many seconds. Returns whether there was anything.
sub receive {
    my ($seconds) = @_;
    my $ready = '';
    vec($ready, fileno $port, 1) = 1;
    return 0 unless select $ready, undef, undef, $seconds;
    my $got = sysread $port, $buffer, 65536, length $buffer;
    return 1 if $got;
    select undef, undef, undef, 0.02;    # no host is connected
    return 0;
}

# Takes the next whole answer of a kind out of the buffer; undef if there is none yet.
sub answer {
    my ($kind) = @_;
    while ($buffer =~ /\A([a-z]+) (\d{1,7})\n/ && length $buffer >= $+[0] + $2) {
        my ($found, $start, $length) = ($1, $+[0], $2);
        my $value = substr $buffer, $start, $length;
        substr($buffer, 0, $start + $length) = '';
        return $value if $found eq $kind;
    }
    die "provisioner: the host's answer is too long\n" if length $buffer > $MAXIMUM_BYTES;
    return undef;
}

# Nanoseconds that a clock shows.
sub nanoseconds {
    my ($clock) = @_;
    my $time = pack 'q2', 0, 0;
    syscall($SYS_CLOCK_GETTIME, $clock, $time) == 0 or die "clock_gettime: $!\n";
    my ($seconds, $nanoseconds) = unpack 'q2', $time;
    return $seconds * 1_000_000_000 + $nanoseconds;
}

# Returns how far the host's time is ahead of the monotonic clock; undef if the host does not tell it. Its answer lies
# between question and receipt: the quickest of so many exchanges counts. On a busy host most take long.
sub host_offset {
    my ($exchanges) = @_;
    my ($shortest, $offset);
    for (1 .. $exchanges) {
        $buffer = '' while receive(0);    # late answers
        $buffer = '';
        my $asked = nanoseconds($CLOCK_MONOTONIC);
        ask('t');
        my $time;
        until (defined($time = answer('time'))) {
            last if !receive(2) && nanoseconds($CLOCK_MONOTONIC) - $asked > 2_000_000_000;
        }
        my $took = nanoseconds($CLOCK_MONOTONIC) - $asked;
        next unless defined $time && $time =~ /\A\d{19}\z/;
        ($shortest, $offset) = ($took, $time + int($took / 2) - ($asked + $took)) if !defined $shortest || $took < $shortest;
        last if $shortest < 10_000_000;
    }
    return $offset;
}

# Returns what the real-time clock shows, in seconds. It shows the host's time, whatever this machine's clocks do.
sub rtc {
    my $path = '/sys/class/rtc/rtc0/since_epoch';
    open my $file, '<', $path or die "$path: $!\n";
    return int <$file>;
}

sub pause {
    select undef, undef, undef, $_[0];
}

# Sets the clock to so many nanoseconds ahead of the monotonic one.
sub set_clock {
    my ($offset) = @_;
    my $now = nanoseconds($CLOCK_MONOTONIC) + $offset;
    my $time = pack 'q2', int($now / 1_000_000_000), $now % 1_000_000_000;
    syscall($SYS_CLOCK_SETTIME, $CLOCK_REALTIME, $time) == 0 or die "clock_settime: $!\n";
}

1;
