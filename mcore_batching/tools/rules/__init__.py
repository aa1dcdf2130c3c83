"""Other frameworks' rules, to compare with.

rules            each rule by its name
rule_parts       dealing, splitting and refusals that rules share
dynamic_cp_rule  Megatron's rule for dynamic CP
"""
