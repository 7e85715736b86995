"""Ridge regression in closed form, from sums that a stream of rows adds up to."""

from __future__ import annotations

import torch


class NotFitted(ValueError):
    """A fit that says nothing: cause, figures and what to do, in its first line."""


class Ridge:
    """Least squares of targets (n, m) on rows (n, d) with a squared penalty.

    ``strength`` is the penalty over the mean square of a row's entries times the count of rows.
    """

    def __init__(self, width: int, targets: int, device: str) -> None:
        self.gram = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.cross = torch.zeros(width, targets, dtype=torch.float64, device=device)
        self.count = 0

    def add(self, rows: torch.Tensor, targets: torch.Tensor) -> None:
        wide = rows.double()
        self.gram += wide.T @ wide
        self.cross += wide.T @ targets.to(wide.device).double()
        self.count += len(rows)

    def solve(self, strength: float) -> torch.Tensor:
        """(d, m) float32. NotFitted where the sums are not finite or have no solution."""
        penalty = strength * self.gram.diagonal().mean()
        if not self.count or not bool(torch.isfinite(penalty)) or float(penalty) <= 0:
            raise NotFitted(
                f"the fit does not converge: {self.count} rows, mean square {float(penalty):.3g}; "
                "nothing can be served; take another seed, or more pictures"
            )
        system = self.gram.clone()
        system.diagonal().add_(penalty)
        factor, bad = torch.linalg.cholesky_ex(system)
        found = torch.cholesky_solve(self.cross, factor).float()
        if int(bad) or not bool(torch.isfinite(found).all()):
            raise NotFitted(
                f"the fit does not converge: no solution from {self.count} rows; "
                "nothing can be served; take another seed, or more pictures"
            )
        return found
