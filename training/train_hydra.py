r"""Train Hydra heads on a frozen target.

    accelerate launch training/train_hydra.py --config configs/drafters/hydra.yaml \
        target=FOLDER output=DIR data.path=CHATS schedule.time_budget=6m
"""

from training.run import main

if __name__ == "__main__":
    main("hydra", "drafters/hydra.yaml", __doc__)
