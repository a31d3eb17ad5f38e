"""The table of downloadable data sets.

It says where each comes from, its checksum, its licence and whom to cite.

`contents` is the sha256 of the parsed arrays (`gallery._fetch.content_hash`), computed from copies.
The copies of letters16x8, mnist, movielens_1m, omniglot, ionosphere, pima_missing and the tables
came another way than `raw`, from the same originals. When this was written no download could be
tried; a source that differs is refused by the content check. What was proven, by parsing public
copies of the raw text:

    zoo_animals                       the whole file, to the same content
    house_votes, breast_cancer,       some rows, equal
    horse_colic, soybean, pima
    mlb_batter_pitcher                two seasons' column names; three games of 2008: 53 pairs that
                                      met in no other, equal
    omniglot                          the averaging only: every byte of the copy is one that it can
                                      give
    mnist_pca50                       recomputed from mnist: all but one bit of 3.5 million (see
                                      there)
    the others                        parsers follow the description of the raw format, and are
                                      tested on fixtures of it
"""

from functools import partial

from gallery import _baseball, _images, _parsers, _views
from gallery._fetch import RawFile, Source

__all__ = ["SOURCES"]

GITHUB = "https://raw.githubusercontent.com/"
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
UCI_LICENCE = "CC BY 4.0 (UCI Machine Learning Repository)"
NOT_STATED = "none stated for the data; used for research"
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
RETROSPLITS = "chadwickbureau/retrosplits/"
# commit -> season -> sha256 of its table
RETROSPLITS_TABLES = {
    "9f1bdf4c13a44856415fa14200e18e4ea2007e39": {
        1998: "643c5188a50edcec5bd4cc1705abb1f922ee7067293de0032c4f6fd0a30d9da3",
        2001: "88eab7f706ddef1680ff64f72929912457b860c6074470f603657db01d6ed7fc",
        2002: "c91657a6512c314fe5af1175435f99894ffe186543fd5adfe465393cd06e45b7",
        2003: "ddc17e08c6472074d6a808de96c763ee7de27c86fcad6e0aafeb11998747ce5e",
        2005: "0ab4ae9d36a39df873995cae9d794de8babff11eb30ca9b6581a78093a43f76d",
    },
    "463f0451902e4c756a8dd746a21c55e1328a3fae": {
        1999: "ebdda81d8dc566fca7cad38b5fc56cea38d3ee977f114ca569a26383299871a1",
        2000: "8e2c24c7b5be48fd6f61307ddaa4897a79027426e179c25472aec635c497d03b",
        2004: "ba06cdb988fcb282d1a14631d763cefbd18dc81c3e73d6e42df4194e31223100",
        2006: "7eb7d568bfd6fc732116ba156577da3b0914ea324440c804fde148f30852478e",
        2007: "b66fc44287495b3dfdcde8eb0fcc1ab1302e2a47051dc90779f79bedd81bf957",
    },
}


def _github(path: str, known_hash: str | None = None, *mirrors: str) -> RawFile:
    return RawFile(path.rsplit("/", 1)[-1], (GITHUB + path, *mirrors), known_hash)


def _uci(path: str, known_hash: str | None = None) -> RawFile:
    return RawFile(path.rsplit("/", 1)[-1], (UCI + path,), known_hash)


def _mnist(name: str, md5: str) -> RawFile:
    return RawFile(name, tuple(mirror + name for mirror in MNIST_MIRRORS), f"md5:{md5}")


PIMA_FILE = _github(
    "darenr/public_datasets/7273440b471b763d750556e92336b5ae6f14385c/pima-indians-diabetes.csv",
    "f463aa68699b14a786355b886c0714d8d0fd2a6eb4e4678d1643057b5f693ecc",
)
PIMA_CITATION = (
    "Smith, Everhart, Dickson, Knowler and Johannes (1988), Using the ADAP learning "
    "algorithm to forecast diabetes mellitus"
)

MNIST = Source(
    name="mnist",
    title="MNIST, handwritten digits of 28 x 28 pixels",
    path="mnist/mnist.npz",
    contents=("8fc8fc4f0343f34ece1fcfdfb65f0801fac48030ce7c70e62bbb62f64ee2e65b",),
    raw=(
        _mnist("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        _mnist("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        _mnist("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        _mnist("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    parse=_parsers.idx_images,
    view=_views.mnist,
    description="x_train (60000 images) and x_test (10000) as bytes 0 .. 255; divide by 255 for "
    "most models.",
    licence="CC BY-SA 3.0, as commonly given (Y. LeCun and C. Cortes)",
    citation="LeCun, Bottou, Bengio and Haffner (1998), Gradient-based learning applied to "
    "document recognition, Proc. IEEE 86",
    url="http://yann.lecun.com/exdb/mnist/",
)

_ALL = (
    Source(
        name="20news_w100",
        title="20 Newsgroups, 100 words present or absent, four groups of boards",
        path="20news_w100/20news_w100.npz",
        contents=("836ece683269d09bc750fc60a4a76af398bfb5196824a8d7ecc5d36f4538468e",),
        raw=(
            _github(
                "probml/probml-data/main/data/20news_w100.mat",
                "6667c5459e22eb544a854bff1443edaaea71735cf1af7b12cc5d986e74af7064",
            ),
        ),
        parse=_parsers.newsgroups_mat,
        view=_views.newsgroups,
        description="16242 posts; x says which of 100 words occur (4 %); classes comp.*, rec.*, "
        "sci.*, talk.*, sorted by class.",
        licence="none stated for the data; the repository that holds them is MIT",
        citation="Roweis, 20 newsgroups (data page, University of Toronto)",
        url="https://github.com/probml/probml-data",
    ),
    Source(
        name="bibtex",
        title="Bibtex, tags of bibliographic entries",
        path="bibtex/bibtex.npz",
        contents=("0b8128d2e88bcc0ce983e7174b16e57bcdfb4fd9a0dd74f9cf77dacae2610e58",),
        raw=tuple(
            _github(
                f"tsoumakas/mulan/43f6389095ad71984264db4387a8074b22bc7d4a/data/multi-label/bibtex/bibtex-{split}.arff",
                known_hash,
            )
            for split, known_hash in {
                "train": "8dcc9de6e0b2cebaec8c1f4fac78431adeeb73cfd3ab879b530a66d366e59174",
                "test": "9b03329cde64d3f994bdf7fbbac3f3b10fe185c311cb9ae725475f59c7f3f922",
            }.items()
        ),
        parse=_parsers.multilabel_arff,
        view=_views.bibtex,
        description="4880 training and 2515 test rows, 1836 binary features, 159 labels, several a "
        "row: sparse rows as index arrays "
        "(x_train_indptr, x_train_indices, labels_train_indptr, ...). Augment and reduce keeps "
        "each row's first label.",
        licence=NOT_STATED,
        citation="Katakis, Tsoumakas and Vlahavas (2008), Multilabel text classification for "
        "automated tag suggestion, ECML/PKDD",
        url="https://mulan.sourceforge.net/datasets-mlc.html",
    ),
    Source(
        name="horse_colic",
        title="Horse colic, a quarter of the cells missing",
        path="horse_colic/horse_colic.npz",
        contents=("587791f2ef3eb626d3ed3788d8ca2d0c328b8fc70ec51500e20b45fcea031136",),
        raw=(
            _github(
                "jbrownlee/Datasets/d20fcb6402ae34e653d4513b00f39257bb37ed7f/horse-colic.data",
                "ba3a74dbba7a4025dc6278fcb8eb8f92b23811f0da5cf951847ada1a40e360e3",
                UCI + "horse-colic/horse-colic.data",
            ),
        ),
        parse=_parsers.horse_colic,
        view=partial(
            _views.labelled,
            class_names=("no surgical lesion", "surgical lesion"),
            feature_names=_views.HORSE,
        ),
        description="300 horses, 21 features of which several are ordinal codes taken as numbers; "
        "is the lesion surgical? "
        "Hospital number, outcome and lesion codes are left out, the last two because they give "
        "the label away.",
        licence=UCI_LICENCE,
        citation="McLeish and Cecile (1989), Horse Colic, UCI Machine Learning Repository, doi "
        "10.24432/C58W23",
        url="https://archive.ics.uci.edu/dataset/47/horse+colic",
    ),
    Source(
        name="ionosphere",
        title="Ionosphere, good and bad radar returns",
        path="ionosphere/ionosphere.npz",
        contents=("6e170991b01408b37186fc16b0c3ec6d775fdd1fa62a6c87c5d7d01ed90585ea",),
        raw=(_uci("ionosphere/ionosphere.data"),),
        parse=_parsers.ionosphere,
        view=partial(_views.labelled, class_names=("good", "bad")),
        description="351 returns, 34 features; class 1 is bad (126). The second column is zero "
        "throughout: add a ridge before "
        "inverting a covariance. The first is binary.",
        licence=UCI_LICENCE,
        citation="Sigillito, Wing, Hutton and Baker (1989), Ionosphere, UCI Machine Learning "
        "Repository, doi 10.24432/C5W01B",
        url="https://archive.ics.uci.edu/dataset/52/ionosphere",
    ),
    Source(
        name="landmine",
        title="Landmines in 29 fields, seen by airborne radar",
        path="landmine/landmine29.npz",
        contents=("23b005a86e6e90b0d318967739a45bf997e2406bfe1b2a6d55593d9bf621148a",),
        raw=(
            _github(
                "daizhongxiang/Federated_Bayesian_Optimization/30a4548606f2ae9bc62c6bf0eb4110177aa3876a/LandmineData.mat",
                "2163ab20a80e33a8b65593c48cf283c540599dcb291105e63fa4af2ce24c2bea",
            ),
        ),
        parse=_parsers.landmine_mat,
        view=_views.landmine,
        description="14820 objects, 9 features; task 0 .. 28 is the field. Tasks 0-14 are "
        "foliated, 15-28 bare earth; the 19 tasks of "
        "Xue et al. are by custom 0-9 and 15-23.",
        licence=NOT_STATED,
        citation="Xue, Liao, Carin and Krishnapuram (2007), Multi-task learning for classification "
        "with Dirichlet process priors, JMLR 8",
        url="https://github.com/daizhongxiang/Federated_Bayesian_Optimization",
    ),
    Source(
        name="letters16x8",
        title="Handwritten lower-case letters of 16 x 8 pixels",
        path="letters16x8/letters16x8.npz",
        contents=("5071f72baa49d37c48b434d1b94c5ae53d3b15a28ef3b249aedd533b0a2869af",),
        raw=(RawFile("letter.data.gz", ("https://ai.stanford.edu/~btaskar/ocr/letter.data.gz",)),),
        parse=_parsers.letters,
        view=_views.letters,
        description="52152 binary images of letters a .. z from 6877 words; `word` and `fold` (0 "
        ".. 9) are given at the source.",
        licence=NOT_STATED,
        citation="Kassel (1995), A comparison of approaches to on-line handwritten character "
        "recognition, MIT; cleaned by B. Taskar",
        url="https://ai.stanford.edu/~btaskar/ocr/",
    ),
    Source(
        name="mlb_batter_pitcher",
        title="Baseball, batter against pitcher, 1998-2008",
        path="mlb_batter_pitcher/mlb_1998_2008.npz",
        contents=("5df3678ec0cf0e52882dc65cd817431d7e5add523c39c8a9b54f83761c113456",),
        raw=(
            *(
                _github(f"{RETROSPLITS}{commit}/splits/headtohead-{year}.csv", known_hash)
                for commit, tables in RETROSPLITS_TABLES.items()
                for year, known_hash in tables.items()
            ),
            _github(
                "ryanjamesyu/BaseballOBP/9dab8306a70f79890eaabf13fb48ff2a5ae64263/2008eve.zip",
                "5983c093f1316b49801d08c2b8078e9ad804573e1eaa124a14e485a3653aea31",
                "https://www.retrosheet.org/events/2008eve.zip",
            ),
        ),
        parse=_baseball.batter_pitcher,
        view=_views.baseball,
        description="One row a season, batter and pitcher (indices into batter_id, pitcher_id): "
        "plate appearances, at-bats, hits; "
        "plays_2008 counts the play records of 2008. 2008 is read from play-by-play, the other "
        "seasons from head-to-head tables.",
        licence="Open Database License 1.0, contents under the Database Contents License 1.0 "
        "(retrosplits). The information used "
        "here was obtained free of charge from and is copyrighted by Retrosheet. Interested "
        "parties may contact "
        "Retrosheet at www.retrosheet.org.",
        citation="Retrosheet, www.retrosheet.org; Chadwick Baseball Bureau, retrosplits",
        url="https://github.com/chadwickbureau/retrosplits",
    ),
    MNIST,
    Source(
        name="mnist_pca50",
        title="MNIST, signs of its first 50 principal components",
        path="mnist_pca50/mnist_pca50_sign.npz",
        # A copy made in mixed precision, and our own float64 recipe: one bit of 3.5 million differs
        # (image 31495, component 43).
        contents=(
            "348e98c7d002af2484b120193309cd2a2374bb7bdec7384fdfd262b783014687",
            "d36f2abe1fc06ca121c34d60393f6e484e6bf0e6355564438153d1be763f044a",
        ),
        raw=(),
        parse=None,
        view=_views.mnist_signs,
        description="70000 binary rows, computed from `mnist`; y is 1 for an odd digit, is_train "
        "marks the first 60000. The AClass "
        "paper's fourth experiment; it does not say whether it centred, this does.",
        licence=MNIST.licence,
        citation=MNIST.citation + "; Mansinghka, Roy, Rifkin and Tenenbaum (2007), AClass, AISTATS",
        url=MNIST.url,
        base=MNIST,
        derive=_images.mnist_component_signs,
    ),
    Source(
        name="movielens_1m",
        title="MovieLens 1M, a million ratings of films",
        path="movielens_1m/ml1m.npz",
        contents=("2b589c586b7059590fef6277d1c39bcc74c75453690b0f57750199d34eaf3d85",),
        raw=(
            RawFile(
                "ml-1m.zip",
                ("https://files.grouplens.org/datasets/movielens/ml-1m.zip",),
                "md5:c4d9eecfca2ab87c1945afe126590906",
            ),
        ),
        parse=_parsers.movielens,
        view=_views.movielens,
        description="1000209 ratings 1 .. 5 as entries (rows, cols, values) of a 6040 x 3952 "
        "matrix, users' sex, age and occupation, "
        "films' genres. 3883 of the 3952 film numbers are listed.",
        licence="Research use with acknowledgement; no redistribution and no commercial use "
        "without GroupLens' permission",
        citation="Harper and Konstan (2015), The MovieLens datasets: history and context, ACM TiiS "
        "5(4), doi 10.1145/2827872",
        url="https://grouplens.org/datasets/movielens/1m/",
    ),
    Source(
        name="oilflow12",
        title="Oil flow in a pipe, three regimes",
        path="oilflow12/oilflow12.npz",
        contents=("271e0c450466bdb7ff299a09d6f0722c47c43ae309d29c74e2973d070d7fc5ff",),
        raw=(
            _github(
                "ngiann/GPLVM.jl/76ad74e716da29858bc1b4c448f82a585d8881ee/src/oil.jld2",
                "f18f18387a63b4c772791a31cfbcf8639e95929dc176e63f5da7f8a205a09561",
            ),
        ),
        parse=_parsers.jld2_oil,
        view=_views.oil,
        description="1000 simulated gamma densitometry readings, 12 features; the source does not "
        "say which regime is which. Not the "
        "14-dimensional set of the Archipelago paper: a stand-in for it.",
        licence=NOT_STATED,
        citation="Bishop and James (1993), Analysis of multiphase flows using dual-energy gamma "
        "densitometry and neural networks",
        url="https://github.com/ngiann/GPLVM.jl",
    ),
    Source(
        name="omniglot",
        title="Omniglot, 1623 handwritten characters, 20 drawings each",
        path="omniglot/omniglot28.npz",
        contents=("57a921b86e7e0343f8d7e8559f4886728cac935d0858d1207fc78eea72db4cea",),
        raw=(
            _github(
                "brendenlake/omniglot/master/python/images_background.zip",
                "md5:68d2efa1b9178cc56df9314c21c6e718",
            ),
            _github(
                "brendenlake/omniglot/master/python/images_evaluation.zip",
                "md5:6b91aef0f799c5bb55b94e3f2daec811",
            ),
        ),
        parse=_images.omniglot,
        view=_views.omniglot,
        description="32460 drawings averaged from 105 x 105 to 28 x 28 bytes, ink 255; drawer 1 .. "
        "20. Class names begin with 0/ for the "
        "background set and 1/ for the evaluation set.",
        licence="MIT (c) 2015 Brenden Lake",
        citation="Lake, Salakhutdinov and Tenenbaum (2015), Human-level concept learning through "
        "program induction, Science 350",
        url="https://github.com/brendenlake/omniglot",
    ),
    Source(
        name="pima_missing",
        title="Pima diabetes, impossible zeros marked as missing",
        path="pima_missing/pima_missing.npz",
        contents=("cb5c8fa0475a269ec0fa5da880e57e8815eda7b6e23c61aae66a3eb761696b37",),
        raw=(PIMA_FILE,),
        parse=_parsers.pima_missing,
        view=partial(_views.labelled, class_names=("neg", "pos"), feature_names=_parsers.PIMA),
        description="768 women, 8 features, 10.6 % of the cells missing, insulin half of the time; "
        "class 1 is diabetes (268).",
        licence=NOT_STATED,
        citation=PIMA_CITATION,
        url="https://github.com/darenr/public_datasets",
    ),
)


_TABLES = (  # small tables with missing or mixed cells, in the folder uci_missing
    Source(
        name="house_votes",
        title="Votes in the US House of Representatives, 1984",
        path="uci_missing/HouseVotes84.csv.gz",
        contents=("eb59e49708f75c8e0af44bb6ced99ca30b7d674a2c9b3ce7d73cca460399620c",),
        raw=(_uci("voting-records/house-votes-84.data"),),
        parse=_parsers.house_votes,
        view=_views.mixed_table,
        description="435 members, 16 votes yes or no, 392 cells missing; which party?",
        licence=UCI_LICENCE,
        citation="Congressional Voting Records (1987), UCI Machine Learning Repository, doi "
        "10.24432/C5C01P",
        url="https://archive.ics.uci.edu/dataset/105/congressional+voting+records",
    ),
    Source(
        name="breast_cancer",
        title="Wisconsin breast cancer (original), scores 1 .. 10",
        path="uci_missing/BreastCancer.csv.gz",
        contents=("92c6535936db96483fb7e799c629474bd8413662081c198edb5f7262dada8bfd",),
        raw=(
            _uci(
                "breast-cancer-wisconsin/breast-cancer-wisconsin.data",
                "402c585309c399237740f635ef9919dc512cca12cbeb20de5e563a4593f22b64",
            ),
        ),
        parse=_parsers.breast_cancer,
        view=_views.mixed_table,
        description="699 samples, 9 ordinal scores taken as numbers, 16 cells missing; benign or "
        "malignant?",
        licence=UCI_LICENCE,
        citation="Wolberg (1992), Breast Cancer Wisconsin (Original), UCI Machine Learning "
        "Repository, doi 10.24432/C5HP4Z",
        url="https://archive.ics.uci.edu/dataset/15/breast+cancer+wisconsin+original",
    ),
    Source(
        name="soybean",
        title="Soybean diseases (large), 35 categorical features",
        path="uci_missing/Soybean.csv.gz",
        contents=("49044c74194e81bca843cf9cf76570010c966a1b21df2dbfa78e3ad4a8d6a55e",),
        raw=(_uci("soybean/soybean-large.data"), _uci("soybean/soybean-large.test")),
        parse=_parsers.soybean,
        view=partial(_views.mixed_table, categorical=True),
        description="683 plants, 19 diseases, 2337 cells missing. Categories are the source's own "
        "codes.",
        licence=UCI_LICENCE,
        citation="Michalski and Chilausky (1980), Soybean (Large), UCI Machine Learning "
        "Repository, doi 10.24432/C5JG6Z",
        url="https://archive.ics.uci.edu/dataset/90/soybean+large",
    ),
    Source(
        name="zoo_animals",
        title="Animals, 15 booleans and a number of legs",
        path="uci_missing/Zoo.csv.gz",
        contents=("e54f266861e72999b4d5be5d55096f9fe94222eae1c13765f4f6a1bb0db34ddb",),
        raw=(_uci("zoo/zoo.data"),),
        parse=_parsers.zoo_animals,
        view=partial(_views.mixed_table, target="type"),
        description="101 animals of 7 kinds, booleans as 0 and 1, nothing missing.",
        licence=UCI_LICENCE,
        citation="Forsyth (1990), Zoo, UCI Machine Learning Repository, doi 10.24432/C5R59V",
        url="https://archive.ics.uci.edu/dataset/111/zoo",
    ),
    Source(
        name="pima",
        title="Pima diabetes as a table, impossible zeros left empty",
        path="uci_missing/PimaIndiansDiabetes2.csv.gz",
        contents=("d71f5de6b40d2db049db9c7da059989447ce0f77ca2dd40a4c60971028ef4f27",),
        raw=(PIMA_FILE,),
        parse=_parsers.pima_table,
        view=partial(_views.mixed_table, target="diabetes"),
        description="768 women, 8 features, 652 cells missing; the same data as `pima_missing`, "
        "stored as a table.",
        licence=NOT_STATED,
        citation=PIMA_CITATION,
        url="https://github.com/darenr/public_datasets",
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in (*_ALL, *_TABLES)}
