"""Loop counts are checked once for every caller; passes of a mixed batch keep active rows first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthdial.cache.loop_counts import ActiveRows, allowed_num_loops, check_num_loops
from depthdial.model.presets import preset

DEPTHS = st.lists(st.integers(1, 6), min_size=1, max_size=8)

# ---- check_num_loops


@pytest.mark.parametrize("given_loops", [0, -1, -(10**9)])
def test_fewer_than_one_loop_is_refused(given_loops):
    with pytest.raises(ValueError, match=rf"num_loops={given_loops} is not allowed; give an int"):
        check_num_loops(given_loops)


@pytest.mark.parametrize("given_loops", [2.0, 2.5, "4", None, True, False, [1, 2], (1,)])
def test_anything_but_an_int_is_refused_by_value_and_type(given_loops):
    with pytest.raises(ValueError, match=type(given_loops).__name__) as error:
        check_num_loops(given_loops)
    assert repr(given_loops) in str(error.value)
    assert "int >= 1" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool, torch.uint8])
def test_a_tensor_of_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=f"{dtype} tensor"):
        check_num_loops(torch.ones(3, dtype=dtype), batch_size=3)


@pytest.mark.parametrize("shape", [(), (1, 3), (0,)])
def test_a_tensor_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="of shape"):
        check_num_loops(torch.ones(shape, dtype=torch.int64))


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match="on meta; give an int >= 1, or a CPU int64 tensor"):
        check_num_loops(torch.ones(3, dtype=torch.int64, device="meta"))


def test_another_number_of_entries_than_rows_is_refused():
    with pytest.raises(ValueError, match="2 entries for a batch of 3 rows"):
        check_num_loops(torch.tensor([1, 2]), batch_size=3)


def test_one_bad_entry_among_good_ones_is_refused():
    with pytest.raises(ValueError, match="num_loops=0 is not allowed"):
        check_num_loops(torch.tensor([2, 0, 4]))


@pytest.mark.parametrize("given_loops", [5, torch.tensor([1, 5])])
def test_beyond_max_loops_is_refused_with_both_numbers_and_the_way_out(given_loops):
    with pytest.raises(ValueError, match=r"num_loops=5 exceeds max_loops=4.*'extrapolate'"):
        check_num_loops(given_loops, max_loops=4)


@pytest.mark.parametrize("given_loops", [1, 4, torch.tensor([4, 1])])
def test_allowed_counts_are_returned_unchanged(given_loops):
    assert check_num_loops(given_loops, max_loops=4) is given_loops


def test_the_model_decides_about_depths_beyond_training():
    config = preset("toy")
    with pytest.raises(ValueError, match="exceeds max_loops=4"):
        allowed_num_loops(config, 5, batch_size=2)
    extrapolating = config.replace(**{"loop.beyond_max_loops": "extrapolate"})
    assert allowed_num_loops(extrapolating, 5, batch_size=2) == 5


# ---- active rows


def passes_of(num_loops, batch_size, *, keeps=()):
    """(rows, num_loops, num_leaving) of every pass; `keeps` are sent after the first passes."""
    active, found = ActiveRows(num_loops, batch_size), []
    while active.num_rows:
        found.append((active.rows, active.num_loops, active.num_leaving(len(found))))
        keep = keeps[len(found) - 1] if len(found) <= len(keeps) else None
        active.after(len(found) - 1, None if keep is None else torch.tensor(keep))
    return found


@given(num_loops=st.integers(1, 6), batch_size=st.integers(1, 5))
def test_one_count_for_all_rows_covers_the_whole_batch_in_user_order(num_loops, batch_size):
    passes = passes_of(num_loops, batch_size)
    assert len(passes) == num_loops
    assert all(rows is None or not len(rows) for rows, _, _ in passes)
    assert all(loops == num_loops for _, loops, _ in passes)
    assert [leaving for _, _, leaving in passes] == [0] * (num_loops - 1) + [batch_size]


@given(depths=DEPTHS)
def test_every_row_runs_exactly_its_own_number_of_passes(depths):
    counts = [0] * len(depths)
    for rows, _, _ in passes_of(torch.tensor(depths), len(depths)):
        for row in rows.tolist():
            counts[row] += 1
    assert counts == depths


@given(depths=DEPTHS)
def test_active_rows_are_a_prefix_of_the_pass_before(depths):
    passes = [rows.tolist() for rows, _, _ in passes_of(torch.tensor(depths), len(depths))]
    assert sorted(passes[0]) == list(range(len(depths)))
    for before, after in zip(passes, passes[1:], strict=False):
        assert before[: len(after)] == after


@given(depths=DEPTHS)
def test_rows_leave_from_the_end_after_their_last_pass(depths):
    left = []
    for loop_idx, (rows, _, leaving) in enumerate(passes_of(torch.tensor(depths), len(depths))):
        gone = rows.tolist()[len(rows) - leaving :]
        assert all(depths[row] == loop_idx + 1 for row in gone)
        left += gone
    assert sorted(left) == list(range(len(depths)))


@given(depths=DEPTHS)
def test_each_pass_carries_the_loop_counts_of_its_rows(depths):
    for rows, loops, _ in passes_of(torch.tensor(depths), len(depths)):
        assert loops.tolist() == [depths[row] for row in rows.tolist()]


def test_rows_of_equal_depth_keep_the_order_given():
    rows, _, _ = passes_of(torch.tensor([2, 3, 2, 3]), 4)[0]
    assert rows.tolist() == [1, 3, 0, 2]


def test_rows_that_stop_early_leave_a_batch_of_one_depth():
    passes = passes_of(4, 3, keeps=[[True, False, True], [False, True]])
    assert [None if rows is None else rows.tolist() for rows, _, _ in passes] == [
        None, [0, 2], [2], [2],
    ]  # fmt: skip


def test_rows_that_stop_early_and_rows_that_are_done_leave_together():
    passes = passes_of(torch.tensor([3, 1, 3]), 3, keeps=[[True, False, True]])
    assert [rows.tolist() for rows, _, _ in passes] == [[0, 2, 1], [0], [0]]


def test_a_batch_whose_rows_all_stop_ends():
    assert len(passes_of(5, 2, keeps=[[True, True], [False, False]])) == 2
