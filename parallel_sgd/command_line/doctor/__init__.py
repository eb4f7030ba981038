"""Check a cluster and advise on its problems: `parallel-sgd doctor`.

======================  =====================================================================
`facts`                 facts about a rank's host, and its speed
`network`               measurements between ranks: pairs of hosts, clocks
`checks`, `speed`       facts in, findings out (a level, a line, advice)
`job_script`            a script that starts a program on ranks like those checked
`ranks`                 the program of the ranks
`command`               the command
======================  =====================================================================
"""
