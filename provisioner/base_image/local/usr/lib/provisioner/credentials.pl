#!/usr/bin/perl
# Waits for this machine's credentials on its virtio-serial port, and writes each to a file of the directory $1 that only
# root can read. Nothing in the machine listens before. The machine may have been copied with all of its memory while it
# waited (a template), so this also gives it random numbers of its own, and the time.
#
# The guest asks with one byte: "?" for the credentials, "t" for the time, and says "." once it has both. The host answers
# "KIND LENGTH\n" and so many bytes. The credentials are records "NAME LENGTH\n" and so many bytes; the last is "end 0\n".
# Only what perl-base has: it is part of every Debian, and quick to start without KVM.
use strict;

my ($directory) = @ARGV;
my $MAXIMUM_BYTES = 1 << 20;
# linux/fcntl.h: O_RDWR | O_NONBLOCK; linux/random.h: RNDADDENTROPY, RNDRESEEDCRNG; asm/unistd_64.h
my ($O_RDWR_NONBLOCK, $RNDADDENTROPY, $RNDRESEEDCRNG) = (0x802, 0x40085203, 0x5207);
my ($SYS_MOUNT, $SYS_CLOCK_SETTIME, $SYS_CLOCK_GETTIME) = (165, 227, 228);
my ($CLOCK_REALTIME, $CLOCK_MONOTONIC, $MS_BIND) = (0, 1, 4096);

# The driver creates the port a moment after the system starts.
my $port;
until (sysopen $port, (glob '/dev/vport*p1')[0] // '', $O_RDWR_NONBLOCK) { select undef, undef, undef, 0.02 }
my $buffer = '';

# Reads what there is, waiting at most so many seconds. Returns whether there was anything.
sub receive {
    my ($seconds) = @_;
    my $ready = '';
    vec($ready, fileno $port, 1) = 1;
    return 0 unless select $ready, undef, undef, $seconds;
    my $got = sysread $port, $buffer, 65536, length $buffer;
    return 1 if $got;
    select undef, undef, undef, 0.02;    # nobody is connected
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

# Nanoseconds since some moment.
sub monotonic {
    my $time = pack 'q2', 0, 0;
    syscall($SYS_CLOCK_GETTIME, $CLOCK_MONOTONIC, $time) == 0 or die "clock_gettime: $!\n";
    my ($seconds, $nanoseconds) = unpack 'q2', $time;
    return $seconds * 1_000_000_000 + $nanoseconds;
}

# Sets the clock to the host's. The answer lies between question and receipt: the quickest of some exchanges counts.
sub set_clock {
    my ($shortest, $offset);
    for (1 .. 20) {    # on a busy host most take long
        $buffer = '' while receive(0);    # late answers
        $buffer = '';
        my $asked = monotonic();
        syswrite $port, 't';
        my $time;
        until (defined($time = answer('time'))) {
            last if !receive(2) && monotonic() - $asked > 2_000_000_000;
        }
        my $took = monotonic() - $asked;
        next unless defined $time && $time =~ /\A\d{19}\z/;
        ($shortest, $offset) = ($took, $time + int($took / 2) - ($asked + $took)) if !defined $shortest || $took < $shortest;
        last if $shortest < 10_000_000;
    }
    die "provisioner: the host does not tell the time\n" unless defined $offset;
    my $now = monotonic() + $offset;
    my $time = pack 'q2', int($now / 1_000_000_000), $now % 1_000_000_000;
    syscall($SYS_CLOCK_SETTIME, $CLOCK_REALTIME, $time) == 0 or die "clock_settime: $!\n";
}

my $message;
until (defined($message = answer('credentials'))) {
    syswrite $port, '?' unless receive(0.1);
}

my %value;
until ($message eq "end 0\n") {
    $message =~ s/\A([a-z_.]{1,64}) (\d{1,7})\n// && length $message >= $2 or die "provisioner: damaged credentials\n";
    $value{$1} = substr $message, 0, $2, '';
}

# First of all: whatever this machine draws at random from now on is its own.
my $seed = delete $value{seed};
length $seed >= 32 or die "provisioner: no seed\n";
open my $random, '+<', '/dev/urandom' or die "/dev/urandom: $!\n";
ioctl $random, $RNDADDENTROPY, pack 'iia*', 8 * length $seed, length $seed, $seed or die "RNDADDENTROPY: $!\n";
ioctl $random, $RNDRESEEDCRNG, 0 or die "RNDRESEEDCRNG: $!\n";

set_clock();

umask 077;
mkdir $directory;
unlink glob "$directory/*";
while (my ($name, $value) = each %value) {
    open my $file, '>', "$directory/$name" or die "$directory/$name: $!\n";
    print $file $value;
    close $file or die "$directory/$name: $!\n";
}

# The kernel has its boot id already, and never draws another.
open my $uuid, '<', '/proc/sys/kernel/random/uuid' or die "uuid: $!\n";
open my $file, '>', "$directory/boot_id" or die "$directory/boot_id: $!\n";
print $file scalar <$uuid>;
close $file or die "$directory/boot_id: $!\n";
chmod 0444, "$directory/boot_id";
my ($source, $target, $none) = ("$directory/boot_id", '/proc/sys/kernel/random/boot_id', '');
syscall($SYS_MOUNT, $source, $target, $none, $MS_BIND, $none) == 0 or die "boot_id: $!\n";

syswrite $port, '.';
