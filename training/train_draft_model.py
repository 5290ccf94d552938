r"""Distil a small standalone drafter: a layer-pruned copy of the target, or another small model.

    accelerate launch training/train_draft_model.py --config configs/drafters/draft_model.yaml \
        target=FOLDER output=DIR data.path=CHATS drafter.num_layers=4 schedule.time_budget=12m
"""

from training.run import main

if __name__ == "__main__":
    main("standalone", "drafters/draft_model.yaml", __doc__)
