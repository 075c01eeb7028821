"""Small nets whose groups are known by construction, with weights from their own generators."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from zoo import redraw_


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        inner = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (inner + self.downsample(x)).relu()


class ResNet(nn.Module):
    """Stem, three stages of two blocks, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 6), Residual(6, 6))
        self.layer3 = nn.Sequential(Residual(6, 8), Residual(8, 8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())))
        return self.fc(x.mean((2, 3)))


class Vgg(nn.Module):
    """A row of convolutions with batch norm, and a classifier of two layers."""

    def __init__(self) -> None:
        super().__init__()
        rows = [[nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()] for a, b in [(3, 4), (4, 6), (6, 8)]]
        self.features = nn.Sequential(*(layer for row in rows for layer in row))
        self.classifier = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 10))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class Tied(nn.Module):
    """An embedding that is the output layer too, without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20, bias=False)
        self.out.weight = self.embed.weight


def resnet() -> nn.Module:
    return redraw_(ResNet())


def vgg() -> nn.Module:
    return redraw_(Vgg())


def tied() -> nn.Module:
    return redraw_(Tied())


def mlp(width: int = 16) -> nn.Module:
    rows = OrderedDict(
        a=nn.Linear(8, width), r=nn.ReLU(), b=nn.Linear(width, width), s=nn.ReLU(), c=nn.Linear(width, 4)
    )
    return redraw_(nn.Sequential(rows))
