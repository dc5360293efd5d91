"""The cost of one stage, fitted to the plans that it has computed: least squares of the relative error, forgetting.

    minimise  Σ λ^age · (1 - predicted / taken)²  +  a few made-up plans that cost what the prior says

Relative to the time taken, since then a stage that was held up weighs little: a plan that took ten times as long as it
should pulls with a tenth of a plan's weight. All three coefficients are fitted, and not one factor, because the default
says little of a: on a CPU attention costs ten times as much, relative to the rest, as on a GPU, and prompts are ordered
by what attention makes of their length. The made-up plans keep coefficients that recent plans do not determine (a,
while only short prompts come) near the prior in relation to the others; a factor of the prior's own is fitted first.
"""

from headrace.scheduler.costs.chunking import Cost

FORGETTING = 0.99  # weight of a plan when the next one comes
DEFAULT_WEIGHT = 0.05  # of a made-up plan where the prior is a default
MEASURED_WEIGHT = 1.0  # where the stage has measured it
PRIOR_PLANS = ((0, 0.25), (0, 1.0), (1, 1.0), (8, 1.0))  # prefix and tokens of the made-up plans, in full plans
SOLVE_ALWAYS = 16  # the first plans each give new coefficients, later ones every eighth: solving takes 10 µs
SOLVE_EVERY = 8
FASTEST = 0.05  # a plan counts as taking at least this share of its prediction: a clock that stood still is no speed

Vector = tuple[float, float, float]


class CostFit:
    """The coefficients of one stage. cost: (a, b, c)."""

    def __init__(self, prior: Cost, chunk_tokens: int, measured: bool = False) -> None:
        """prior: coefficients while no plan is known. measured: they were, and are not a default."""
        self._unit: Vector = (float(chunk_tokens) ** 2, float(chunk_tokens), 1.0)
        self._prior: Vector = (prior[0] * self._unit[0], prior[1] * self._unit[1], prior[2])
        self._weight = MEASURED_WEIGHT if measured else DEFAULT_WEIGHT
        self._matrix = [[0.0] * 3 for _ in range(3)]  # Σ v·vᵀ, v = features / taken
        self._right = [0.0] * 3  # Σ v
        self._ratio = self._ratio2 = 0.0  # Σ p and Σ p², p = prior / taken
        self._seconds = self._tokens = 0.0
        self._plans = 0
        self.cost = prior
        self.scaled = measured
        """The coefficients are seconds: they were measured, or some plan was computed."""

        self.by_tokens: Cost = (0.0, prior[1] + prior[2] / chunk_tokens, 0.0)
        """The cost per token alone, at the recent speed."""

    def observe(self, squares: int, tokens: int, seconds: float) -> None:
        """A plan of this load has taken so many seconds."""
        features: Vector = (squares / self._unit[0], tokens / self._unit[1], 1.0)
        if self.scaled:
            a, b, c = self.cost
            seconds = max(seconds, FASTEST * (a * squares + b * tokens + c))
        vector = tuple(feature / seconds for feature in features)
        for row, left in zip(self._matrix, vector, strict=True):
            for column, value in enumerate(vector):
                row[column] = row[column] * FORGETTING + left * value
        self._right = [FORGETTING * old + new for old, new in zip(self._right, vector, strict=True)]
        ratio = _dot(self._prior, features) / seconds
        self._ratio = FORGETTING * self._ratio + ratio
        self._ratio2 = FORGETTING * self._ratio2 + ratio * ratio
        self._seconds = FORGETTING * self._seconds + seconds
        self._tokens = FORGETTING * self._tokens + tokens
        self._plans += 1
        if self._plans <= SOLVE_ALWAYS or self._plans % SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        factor = self._ratio / self._ratio2  # the multiple of the prior that fits best
        matrix, right = [list(row) for row in self._matrix], list(self._right)
        for prefix, count in PRIOR_PLANS:
            features: Vector = ((prefix + count) ** 2 - prefix**2, count, 1.0)
            taken = factor * _dot(self._prior, features)
            vector = [feature / taken for feature in features]
            for row, left in enumerate(vector):
                right[row] += self._weight * left
                for column, value in enumerate(vector):
                    matrix[row][column] += self._weight * left * value
        found = solve_nonnegative(matrix, right)
        a, b, c = (value / unit for value, unit in zip(found, self._unit, strict=True))
        self.cost = (a, b, c)
        self.by_tokens = (0.0, self._seconds / self._tokens, 0.0)
        self.scaled = True


def solve_nonnegative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive definite system of normal equations, with no unknown below zero: a term that comes out negative
    is dropped, the most negative first, and the rest is solved again."""
    kept = list(range(len(right)))
    while True:
        found = _solve([[matrix[row][column] for column in kept] for row in kept], [right[row] for row in kept])
        if all(value >= 0 for value in found):
            break
        shares = [value * right[index] for value, index in zip(found, kept, strict=True)]
        del kept[shares.index(min(shares))]
    solution = [0.0] * len(right)
    for index, value in zip(kept, found, strict=True):
        solution[index] = value
    return solution


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the pivots of a positive definite matrix are positive."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[below][column] -= factor * rows[pivot][column]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (rows[row][size] - known) / rows[row][row]
    return found


def _dot(left: Vector, right: Vector) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]
