# Tells a word to visitors who ask politely.
use strict;
use warnings;
use IO::Socket::INET;

my $server = IO::Socket::INET->new(LocalPort => 7000, Listen => 5, ReuseAddr => 1) or die "cannot listen: $!";
while (my $visitor = $server->accept) {
    my $line = <$visitor> // "";
    print $visitor $line =~ /please/i ? "The word is cormorant.\n" : "Say please.\n";
    close $visitor;
}
