#!/usr/bin/perl
# Waits for this machine's credentials on its virtio-serial port, and writes each to a file of the directory $1 that only
# root can read. Nothing in the machine listens before. The machine may have been copied with all of its memory while it
# waited (a template), so this also gives it random numbers of its own, and the time.
#
# The credentials are records "NAME LENGTH\n" and so many bytes; the last is "end 0\n".
use strict;

require((__FILE__ =~ m{\A(.*/)})[0] . 'host.pl');
my ($directory) = @ARGV;
my ($RNDADDENTROPY, $RNDRESEEDCRNG) = (0x40085203, 0x5207);    # linux/random.h
my ($SYS_MOUNT, $MS_BIND) = (165, 4096);    # asm/unistd_64.h, linux/mount.h

open_port();
my $message;
until (defined($message = answer('credentials'))) {
    ask('?') unless receive(0.1);
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

my $offset = host_offset(20);
defined $offset or die "provisioner: the host does not tell the time\n";
set_clock($offset);

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

ask('.');
