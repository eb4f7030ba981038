"""Check a cluster and advise on its problems: `parallel-sgd doctor`.

======================  =====================================================================
`finding`               the result of a check: a level, a line, advice
`facts`                 facts about a rank's host, and its speed
`network`               measurements between ranks: pairs of hosts, clocks
`checks`, `speed`       facts in, findings out: no measurement, no communication
`ranks`                 the program of the ranks
`command`               the command
======================  =====================================================================
"""
