"""The shipped quorum in virtual time: what a rule would do with these workers, before any of them is paid for."""
