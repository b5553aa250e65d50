"""FoPE for models in which several query heads share a key head (grouped-query attention)."""

from fope import FoPE, PositionError, apply_rotation


class GroupedFoPE(FoPE):
    """
    FoPE with fewer tables than heads: n_head / n_table neighbouring query heads share a table, as
    they share a key head. So a key is turned once for all queries of its group, before the cache.
    n_table is the number of key heads; by default each head has its own table.
    """

    def __init__(self, *, n_head, n_table: int | None = None, **kwargs):
        n_table = n_head if n_table is None else n_table
        if n_table < 1 or n_head % n_table:
            raise PositionError(f"n_table must divide {n_head} heads, which {n_table} does not")
        super().__init__(n_head=n_table, **kwargs)  # what FoPE draws for each of its heads
        self.n_head = n_head

    def rotate(self, q, k):
        """q (B, n_head, T, head_dim), k (B, n_table, T, head_dim) or as many heads as q."""
        cos, sin = self.tables(q.size(-2))  # (n_table, T, head_dim/2)

        def turned(x):
            n_shared = x.size(1) // len(cos)
            tables = (table.repeat_interleave(n_shared, dim=0) for table in (cos, sin))
            return apply_rotation(x, *tables)

        return turned(q), turned(k)
