"""Fields of samples: their kinds, how these are found, and whether values fit.

fields        one field's kind, and its value in a placeholder
schema        the fields of a batch
infer         the kind of a field that is not declared
field_checks  a batch checked against its schema
value_shapes  shape, type and number of values
value_checks  single values that would be misread without an error
"""
