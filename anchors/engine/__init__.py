"""From bytes to a plan that is proven: Target -> Source -> Located -> Plan -> VerifiedPlan.

Here files are read and nothing is written. `verbs.commit` takes a VerifiedPlan on: it makes the
Job that `writing` carries out, and leaves a Receipt.
"""
