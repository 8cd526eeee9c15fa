"""Random routing problems and error budgets derived from float64, to test any implementation of ``route``.

    @given(problems(dtype=torch.bfloat16))
    def test_my_route(problem):
        assert_within_budget(problem, problem.run(my_route))

Needs Hypothesis: ``pip install mhar-compile[test]``.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError("mhar_compile.testing needs Hypothesis; install mhar-compile[test]") from error

from .budget import assert_within_budget, budgets, ratios
from .problems import Problem, Recipe, problems, recipes, routed

__all__ = ["Problem", "Recipe", "assert_within_budget", "budgets", "problems", "ratios", "recipes", "routed"]
