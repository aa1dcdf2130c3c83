"""Pictures of plans and of recorded steps.

timeline     start and end of every pass of a step
plot         a step: passes, working stages, and fill by `plot_fill`
plot_fill    how full each micro-batch is
picture      pictures as files: .png, .svg or .html
"""
