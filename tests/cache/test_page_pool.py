from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.cache.page_pool import PagePool


def test_pages_are_given_once_and_come_back():
    pool = PagePool(8)
    first, second = pool.allocate(3), pool.allocate(5)
    assert sorted([*first, *second]) == list(range(8))
    pool.check_integrity([*first, *second])
    pool.free(second)
    assert set(pool.allocate(5).tolist()) == set(second.tolist())


def test_too_many_pages_raise_and_change_nothing():
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(MemoryError, match="2 KV pages asked for, 1 of 4"):
        pool.allocate(2)
    assert pool.num_free == 1


@pytest.mark.parametrize("pages", [[0, 0], [7], [4], [-1], [0, 5]])
def test_freeing_what_is_not_owned_raises_and_changes_nothing(pages):
    pool = PagePool(5)
    owned = pool.allocate(3)
    wrong = np.array([owned[0] if page == 0 else page for page in pages], dtype=np.int32)
    with pytest.raises(ValueError, match="freed"):
        pool.free(wrong)
    pool.check_integrity(owned)


def test_freeing_twice_raises():
    pool = PagePool(5)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(ValueError, match="twice"):
        pool.free(pages)
    assert pool.num_free == 5


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_keeps_every_page_with_one_owner(seed):
    rng = np.random.default_rng(seed)
    pool, owners = PagePool(50), []
    for _ in range(2000):
        if rng.random() < 0.5 and owners:
            pool.free(owners.pop(int(rng.integers(len(owners)))))
        else:
            count = int(rng.integers(0, 8))
            if count <= pool.num_free:
                owners.append(pool.allocate(count))
        pool.check_integrity([page for pages in owners for page in pages])
