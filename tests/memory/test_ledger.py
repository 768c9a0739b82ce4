from hf_mp.memory.ledger import Category, Ledger, Phase, profile_step


def test_the_peak_is_found_with_what_was_in_use_then():
    ledger = Ledger()
    ledger.allocate(1, 100, Category.MASTER_WEIGHTS, "")
    ledger.start_step()
    ledger.phase = Phase.FORWARD
    ledger.allocate(2, 30, Category.ACTIVATIONS, "mm")
    ledger.allocate(3, 50, Category.ACTIVATIONS, "softmax")
    ledger.phase = Phase.BACKWARD
    ledger.free(3)
    ledger.allocate(4, 60, Category.TEMPORARIES, "mm_backward")
    ledger.free(2)
    profile = profile_step(ledger.events)
    assert profile.peak_bytes == 190
    assert (profile.peak_phase, profile.peak_op) == (Phase.BACKWARD, "mm_backward")
    in_use = {key: size for key, size in profile.bytes_by_category.items() if size}
    assert in_use == {Category.MASTER_WEIGHTS: 100, Category.ACTIVATIONS: 30, Category.TEMPORARIES: 60}
    assert sum(profile.by_phase[Phase.FORWARD].values()) == 180 and Phase.SETUP not in profile.by_phase
    assert set(profile.bytes_by_category) == set(Category)


def test_what_forward_frees_itself_was_temporary():
    ledger = Ledger(phase=Phase.FORWARD)
    ledger.allocate(1, 8, Category.ACTIVATIONS, "cast")
    ledger.allocate(2, 4, Category.ACTIVATIONS, "mm")
    ledger.free(1)
    ledger.phase = Phase.BACKWARD
    ledger.free(2)
    assert [(event.allocation.category, event.sign) for event in ledger.events] == [
        (Category.TEMPORARIES, 1),
        (Category.ACTIVATIONS, 1),
        (Category.TEMPORARIES, -1),
        (Category.ACTIVATIONS, -1),
    ]


def test_what_a_storage_turns_out_to_be_for_holds_from_its_beginning():
    ledger = Ledger(phase=Phase.BACKWARD)
    ledger.allocate(1, 8, Category.TEMPORARIES, "mm")
    ledger.live[1].category = Category.GRADIENTS
    assert profile_step(ledger.events).bytes_by_category[Category.GRADIENTS] == 8
