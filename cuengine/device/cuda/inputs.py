"""A step's index arrays on the device: packed, padded for a graph where it is a decode step, sent.

The model's operations get addresses from here and look at no array of the batch themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuengine.batch import Batch, Int32, Int64
from cuengine.device.cuda.attention import AttentionPlan, PagedAttention
from cuengine.device.cuda.graphs import GraphKey, graph_key
from cuengine.device.cuda.runtime import DeviceArray, Runtime
from cuengine.device.cuda.staging import Staging, aligned
from cuengine.device.interface import StepLimits

_GUARD = 1
"""Columns of the block tables that no sequence needs. A kernel that reads one entry too far would
find the next sequence's block, which it may use; so it finds what the emulator forbids."""


@dataclass(slots=True)
class StagedStep:
    """A Batch on the device. Addresses are the device's; counts include padding.

    graph       what it may be captured for; None: it runs eagerly
    num_rows    rows of logits that somebody asked for
    rows_are_tokens  every token's logits are wanted, in order
    slots, lens, tables, device_tables   what `Runtime.guard` is told
    """

    batch: Batch
    graph: GraphKey | None
    plan: AttentionPlan
    num_tokens: int
    num_rows: int
    rows_are_tokens: bool
    token_ids: int
    positions: int
    slot_mapping: int
    query_start_loc: int
    seq_lens: int
    block_tables: int
    table_width: int
    logits_indices: int
    tiles: int
    token_sources: int
    slots: Int64
    lens: Int32
    tables: Int32
    device_tables: DeviceArray


class StepInputs:
    """Persistent device memory for the index arrays of one step, filled by one copy."""

    def __init__(
        self,
        runtime: Runtime,
        attention: PagedAttention,
        limits: StepLimits,
        *,
        max_tiles: int,
        use_graphs: bool,
    ) -> None:
        self._attention = attention
        self._limits = limits
        self._use_graphs = use_graphs
        tokens, seqs = limits.max_tokens, limits.max_num_seqs
        width = -(-limits.max_model_len // limits.block_size) + _GUARD
        sizes = (
            *(4 * tokens, 4 * tokens, 4 * tokens, 8 * tokens),
            *(4 * (seqs + 1), 4 * seqs, 4 * limits.max_rows, 4 * seqs * width, 8 * max_tiles),
        )
        self._staging = Staging(runtime, sum(map(aligned, sizes)))

    def stage(self, batch: Batch, *, block_size: int, scratch_block: int) -> StagedStep:
        """Raises ValueError for a step beyond the limits."""
        count, rows = len(batch.seq_lens), len(batch.logits_indices)
        starts = batch.query_start_loc
        decodes = (
            len(batch.token_ids) == count
            and rows == count
            and np.array_equal(starts, np.arange(count + 1))
            and np.array_equal(batch.logits_indices, starts[:-1])
        )
        key = None
        num_seqs, num_tokens, width = count, len(batch.token_ids), batch.block_tables.shape[1]
        if decodes and self._use_graphs and 0 < count <= self._limits.max_num_seqs:
            key = graph_key(
                count,
                int(batch.seq_lens.max()),
                max_num_seqs=self._limits.max_num_seqs,
                max_model_len=self._limits.max_model_len,
            )
            num_seqs = num_tokens = key.num_seqs
            width = -(-key.context // block_size)
            plan = self._attention.plan_decodes(num_seqs, key.context)
        else:
            plan = self._attention.plan(batch)

        staging = self._staging
        staging.start()
        # Padding is a sequence of one token 0 in the scratch block, as often as needed.
        token_ids, token_ids_at = staging.add((num_tokens,), np.int32)
        _fill(token_ids, batch.token_ids, 0)
        positions, positions_at = staging.add((num_tokens,), np.int32)
        _fill(positions, batch.positions, 0)
        slots, slots_at = staging.add((num_tokens,), np.int64)
        _fill(slots, batch.slot_mapping, scratch_block * block_size)
        query_start_loc, query_start_loc_at = staging.add((num_seqs + 1,), np.int32)
        query_start_loc[: count + 1] = starts
        query_start_loc[count + 1 :] = np.arange(count + 1, num_seqs + 1)
        lens, lens_at = staging.add((num_seqs,), np.int32)
        _fill(lens, batch.seq_lens, 1)
        width += _GUARD
        tables, tables_at = staging.add((num_seqs, width), np.int32)
        tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
        tables[count:, 0] = scratch_block
        step = StagedStep(
            batch=batch,
            graph=key,
            plan=plan,
            num_tokens=num_tokens,
            num_rows=rows,
            rows_are_tokens=decodes,
            token_ids=token_ids_at,
            positions=positions_at,
            slot_mapping=slots_at,
            query_start_loc=query_start_loc_at,
            seq_lens=lens_at,
            block_tables=tables_at,
            table_width=width,
            logits_indices=staging.put(batch.logits_indices),
            tiles=staging.put(plan.tiles),
            token_sources=staging.put_optional(batch.token_sources),
            slots=slots,
            lens=lens,
            tables=tables,
            device_tables=staging.device_view(tables_at, tables.shape, np.int32),
        )
        staging.send()
        return step


def _fill(target: Int32 | Int64, source: Int32 | Int64, padding: int) -> None:
    target[: len(source)] = source
    target[len(source) :] = padding
