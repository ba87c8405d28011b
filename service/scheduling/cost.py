"""What a window will cost: seconds = a + b tokens + c squares, fitted to the windows that ran. No clock of its own.

`squares` is the sum of the squared lengths of a window's sequences, 0 for position-wise models: attention's share.
"""

from __future__ import annotations

from math import isfinite, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

LONGEST_S: Final = 3600.0
FIXED_SHARE: Final = 0.2  # of a window's predicted time, the most that a small `room_s` makes of its fixed cost
_SHORTEST_S: Final = 1e-7
_LEAST_TOKEN_S: Final = 1e-12  # no token is free: shares and chunks divide by it

# Units of the fit in which its three parameters are of one size: a window of 256 tokens in one sequence.
_SCALE: Final = (1.0, 256.0, 256.0**2)
# Standard deviations before anything ran. The fixed cost is known best, so that a first window is read as a price per
# token: small windows are then never thought dearer than they are.
_PRIOR_S: Final = (3e-4, 10.0, 1.0)
_DRIFT: Final = 0.02  # how far, of itself, a parameter may move from one window to the next
# How far, of the window's time, the fixed cost may: on a machine that does other work too, what grows is the wait for
# a core, and no token is dearer. Were it put down to the tokens, chunks would be made smaller and pay it more often,
# the tokens would seem dearer yet, and so on down to chunks of a token. Of longer windows it is of no account.
_FIXED_DRIFT: Final = 0.005
_FIXED_DRIFT_MOST_S: Final = 5e-5
_FIXED_SPREAD: Final = 0.3  # standard deviation of the fixed cost, of the window's time, that drift may lead to
_OUTLIER: Final = 3.0  # standard deviations beyond which a window counts for no more (Huber)
_NOISE: Final = (0.03, 1.0)  # relative deviation of a window's time: least and most that is believed
_NOISE_MEMORY: Final = 0.05
_START_NOISE: Final = 0.1


class CostModel:
    """Recursive least squares in its Kalman form, robust, with non-negative and bounded parameters.

    It forgets by letting each parameter drift, and not by discounting the past as a whole: where all windows are of one
    size the slope is not observed, and a discounted fit would lose it. A negative parameter is conditioned to zero
    (Simon, "Kalman filtering with state constraints", 2010), which moves the others as their covariance says.
    """

    __slots__ = ("_cov", "_fixed_s", "_noise", "_square_s", "_theta", "_token_s", "observed")

    def __init__(self) -> None:
        self._theta = [0.0, 0.0, 0.0]
        self._cov = [[_PRIOR_S[i] ** 2 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._noise = _START_NOISE**2
        self._fixed_s = self._square_s = 0.0
        self._token_s = _LEAST_TOKEN_S
        self.observed = 0  # windows

    @property
    def parameters(self) -> tuple[float, float, float]:
        """a (seconds), b (seconds a token), c (seconds a squared token)."""
        return self._fixed_s, self._token_s, self._square_s

    def seconds(self, tokens: float, squares: float = 0.0) -> float:
        """Of a whole window, at most LONGEST_S; next to nothing before anything was observed."""
        seconds = self._fixed_s + self._token_s * tokens + self._square_s * squares
        return seconds if seconds < LONGEST_S else LONGEST_S  # asked for each request: `min` takes twice the time

    def marginal(self, tokens: float, squares: float = 0.0) -> float:
        """What these tokens add to a window; positive."""
        return self._token_s * tokens + self._square_s * squares

    def marginals(self, tokens: NDArray[np.int64], squares: NDArray[np.int64]) -> NDArray[np.float64]:
        """`marginal`, elementwise."""
        return self._token_s * tokens + self._square_s * squares

    def room_s(self, window_s: float) -> float:
        """What may be added to an empty window for it to take `window_s`, its fixed cost paid.

        At least so much that the fixed cost is FIXED_SHARE of the window: what is cut into smaller ones loses more of
        the engine to them than the others gain by waiting less.
        """
        return max(window_s - self._fixed_s, self._fixed_s * (1 / FIXED_SHARE - 1))

    def observe(self, tokens: float, squares: float, seconds: float) -> None:
        """A window of `tokens` took `seconds`; nonsense (negative, not a number) is not learned from."""
        if not (isfinite(seconds) and seconds >= 0 and tokens > 0):
            return
        seconds = min(max(seconds, _SHORTEST_S), LONGEST_S)
        x = (1.0, tokens / _SCALE[1], squares / _SCALE[2])
        theta, cov = self._theta, self._cov
        predicted = sum(value * at for value, at in zip(theta, x, strict=True))
        for i in (1, 2):
            if cov[i][i] < _PRIOR_S[i] ** 2:
                cov[i][i] += (_DRIFT * theta[i]) ** 2
        drift = min(_FIXED_DRIFT * predicted, _FIXED_DRIFT_MOST_S)
        if cov[0][0] < max(_PRIOR_S[0], _FIXED_SPREAD / _FIXED_DRIFT * drift) ** 2:
            cov[0][0] += drift**2
        toward = [sum(cov[i][j] * x[j] for j in range(3)) for i in range(3)]
        spread = max(0.0, sum(toward[i] * x[i] for i in range(3)))
        scale = max(predicted, seconds if not self.observed else 0.0, _SHORTEST_S)
        variance = spread + self._noise * scale * scale
        missed = seconds - predicted
        surprise = abs(missed) / sqrt(variance)
        if surprise > _OUTLIER:
            missed *= _OUTLIER / surprise
        gain = [value / variance for value in toward]
        for i in range(3):
            theta[i] += gain[i] * missed
            for j in range(3):
                cov[i][j] -= gain[i] * toward[j]
        if self.observed:
            relative = min((missed / scale) ** 2, _NOISE[1] ** 2)
            self._noise += _NOISE_MEMORY * (max(relative, _NOISE[0] ** 2) - self._noise)
        self.observed += 1
        self._constrain()

    def _constrain(self) -> None:
        theta, cov = self._theta, self._cov
        for _ in range(3):
            i = min(range(3), key=theta.__getitem__)
            if theta[i] >= 0:
                break
            step = theta[i] / cov[i][i] if cov[i][i] > 0 else 0.0
            theta[:] = [theta[k] - cov[k][i] * step for k in range(3)]
            theta[i] = 0.0
        for i in range(3):
            theta[i] = min(max(theta[i], 0.0), LONGEST_S)
            cov[i][i] = max(cov[i][i], 0.0)
            for j in range(i):  # rounding must not make it lopsided
                cov[i][j] = cov[j][i] = (cov[i][j] + cov[j][i]) / 2
        self._fixed_s, self._square_s = theta[0], theta[2] / _SCALE[2]
        self._token_s = max(theta[1] / _SCALE[1], _LEAST_TOKEN_S)
