"""`parallel-sgd doctor`: is anything wrong with this cluster, and what is to be done about it?

======================  =====================================================================
`finding`               what a check says: a level, a line, what to do
`facts`                 what a rank finds out about its host, and how fast that is
`network`               what the ranks measure together: pairs of hosts, clocks
`checks`, `speed`       facts in, findings out: no measurement, no communication
`ranks`                 what runs on the ranks
`command`               the command
======================  =====================================================================
"""
