#!/usr/bin/env python3
"""Writes tokenizers/corpus.json: the multilingual corpus of the tokenizer goldens.

A JSON array of strings. All sentences were written for this file. It serves both as training text
for the small tokenizers of make_tokenizers.py and as the text on which they are compared.
Usage: make_corpus.py [OUTPUT_FOLDER]
"""

import json
import pathlib
import sys

ENGLISH = """\
The second voice enters before the first has finished its theme.
A generator writes rollouts while the trainer learns from the last ones.
What is 17 plus 25? The answer is 42.
hello
 hello
Hello world
Hello, World! Hello, world? HELLO WORLD...
The quick brown fox jumps over the lazy dog; the dog does not mind.
internationalization internationalization, internationalization
I'm sure they're right, you've won, she'll come, he'd say it's John's, don't you think we can't?
I'M SURE THEY'RE RIGHT, YOU'VE WON, SHE'LL COME, HE'D SAY IT'S JOHN'S
'tis the season; rock 'n' roll, the '90s, o'clock, ma'am, y'all'd've
It’s a curly apostrophe, and they’re everywhere: don’t, won’t, I’ll.
"Quoted," she said, 'and quoted again.' (Or was it?)
One two three four five six seven eight nine ten eleven twelve.
Is there a limit? Yes: 3.14159, not 2.71828!
A sentence without an end
The weights are bfloat16, the sums are float32, the answer is exact.
A token is a pure function of its prefix and of the weights.
Never sum in an order that depends on how many threads there are.
The coordinator counts, the scorer judges, the trainer learns, the generator writes.
Please compute the sum of the numbers from one to one hundred.
Let x be a number such that x*x = 49. Then x is 7 or -7.
There were 12 apples; Anna took 5, so 7 were left.
A train leaves at 09:45 and arrives at 13:20. How long is the journey?
Name: Ada Lovelace; born: 1815-12-10; e-mail: ada@example.org
Visit https://example.org/path/to/page?query=1&other=two#frag or www.example.com.
re-entrant, state-of-the-art, 24/7, and/or, C++20, F#, .NET, AT&T, 50%
supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
abababababababababababababababab
a b c d e f g h i j k l m n o p q r s t u v w x y z
ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz
CamelCaseWords snake_case_words kebab-case-words SCREAMING_SNAKE_CASE mixedUP123case
the the the the the the the the""".split("\n")

LATIN = """\
Ein Größenwahnsinniger fährt über die Straße, weil er müßig ist.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
Où est l'élève qui a oublié son cahier à l'école ? « Ici ! », répond-il.
Le cœur a ses raisons, l'œil voit, naïve et Noël ; ça va ?
El niño comió piñas en la mañana. ¿Dónde está? ¡Aquí!
A ação não é fácil: três mães, quatro irmãos, coração.
Però la città è così bella che perché no?
Zażółć gęślą jaźń, bo żółw śpi.
Příliš žluťoučký kůň úpěl ďábelské ódy.
Árvíztűrő tükörfúrógép, őszi esőben.
Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul, Iğdır, ısı.
Țara noastră și ștrandul însorit, în zori.
Blåbærsyltetøy på brød, æbler og øl, Ångström.
Það er íslenska: þú ert góður, ævintýri.
Tiếng Việt có nhiều dấu: người, được, không, một, Nguyễn.
Ħobż Malti, għajn, żejt u ħut.
Šį rytą ąžuolas žydėjo, ėjau į mišką.
Ọjọ́ dára púpọ̀, ẹ káàárọ̀ o.
ﬁne ligatures: ﬁ ﬂ ﬀ ﬃ, ǅ ǆ, ß ẞ""".split("\n")

CYRILLIC_GREEK = """\
Съешь же ещё этих мягких французских булок, да выпей чаю.
Привет, мир! Как дела? Сколько будет два плюс два?
Ґанок, їжак, єнот і п'ять м’ячів у Києві.
Ђак, Љубав, Џеп, Ћуприја и њива.
Быть или не быть: вот в чём вопрос.
Жълтата дюля беше щастлива, че пухът замръзна.
Қазақ тілі: әдемі, ғылым, өнер, ұлы, үй, һәм.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
Καλημέρα κόσμε! Πόσο κάνει δύο και τρία;
Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ λόγος ἦν καλός.
ΑΒΓΔΕ ΖΗΘ αβγδε ς σ Σ""".split("\n")

RTL = """\
مرحبا بالعالم، كيف حالك اليوم؟
السَّلامُ عَلَيْكُم وَرَحْمَةُ اللهِ
العدد ٣٫١٤ والسنة ٢٠٢٦، والنسبة ٥٠٪
سلام دنیا، می‌خواهم کتاب‌ها را بخوانم.
یہ اردو ہے، کیا آپ سمجھتے ہیں؟
שלום עולם! מה שלומך היום?
שָׁלוֹם עֲלֵיכֶם, הַכֹּל בְּסֵדֶר
מספר 42 בתוך משפט, ו-3.5 אחוז.
Mixed العربية and English و עברית in 1 line.""".split("\n")

INDIC_THAI = """\
नमस्ते दुनिया, आप कैसे हैं?
क्षत्रिय, ज्ञान, श्री, र्‍य, हिन्दी में २०२६ का साल।
वह पाँच सेब खरीदता है और दो खाता है।
বাংলা ভাষায় একটি ছোট বাক্য, ১২৩।
தமிழ் மொழியில் ஒரு சிறிய வாக்கியம், ௧௨௩.
తెలుగు వాక్యం ఒకటి ఇక్కడ ఉంది.
ಕನ್ನಡ ಮತ್ತು മലയാളം ഭാഷകൾ
ਪੰਜਾਬੀ, ગુજરાતી, ଓଡ଼ିଆ, සිංහල
สวัสดีชาวโลก วันนี้อากาศดีมาก
ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓ บาท
ນີ້ແມ່ນພາສາລາວ ១២៣ ភាសាខ្មែរ
མཐའ་བཞི་ལ་བོད་ཡིག ဗမာစာ
አማርኛ ቋንቋ ፩፪፫ ነው።
ქართული ენა ლამაზია. ᲥᲐᲠᲗᲣᲚᲘ
Հայերեն լեզուն գեղեցիկ է։
Монгол ᠮᠣᠩᠭᠣᠯ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ""".split("\n")

CJK = """\
你好，世界！今天天气怎么样？
二加三等于多少？答案是五。
中文没有空格，所以分词不容易。
繁體中文：龍、龜、鬱、體驗、學習。
价格是１２３元，全角ＡＢＣ和半角ABC混合。
模型在生成，训练器在学习，两者同时进行。
吾輩は猫である。名前はまだ無い、と言いたいところだ。
カタカナとひらがなと漢字を混ぜて書く。
ｶﾀｶﾅ ﾊﾝｶｸ、パピプペポ、がぎぐげご
東京都の人口は約１４００万人です。２＋２＝４
안녕하세요, 세계! 오늘은 어때요?
한국어 문장은 띄어쓰기를 합니다. 삼 더하기 사는 칠입니다.
가각갂갃간갅 ㄱㄴㄷ ㅏㅑㅓ
中英文mixed混合text和123数字
「引用」『二重』（括弧）【隅付き】〜！？
𠮷野家で𩸽を食べる 𪚥""".split("\n")

CODE = r"""int main() { return 0; }
for (int i = 0; i < 10; ++i) { sum += a[i] * b[i]; }
    if (x != nullptr && y->z == 3) { /* comment */ }
std::vector<std::pair<int, std::string>> v{{1, "a"}, {2, "b"}};
SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name;
{"key": [1, 2.5, -3e10, true, null], "nested": {"a": "b\\n"}}
<div class="box" id='x'>text &amp; more</div>
$ grep -rn "foo" . | awk '{print $1}' > out.txt 2>&1
x = [i for i in range(100) if i % 3 == 0]
a=b+c-d*e/f%g^h&i|j~k!l
!!!???...,,,;;;:::---===+++***///\\\\|||
((((([[[[[{{{{{<<<<<>>>>>}}}}}]]]]])))))
_ __ ___ ____ _____ @ @@ @@@ # ## ### $ $$ % %% ^ & *
0x1F 0b1010 0o17 1_000_000 1e-9 6.02e23 .5 5. 1..2
// TODO?no; return;// done
C:\\Users\\name\\file.txt /usr/local/bin ~/.config ../..
λx. x + 1 → ∀x∈ℝ: x² ≥ 0 ∧ √2 ≠ ∞""".split("\n")

# Lines of code with line breaks inside, which the list above cannot hold.
MULTILINE = [
    "def f(x):\n    return x ** 2 + 1\n\n\nprint(f(3))\n",
    "\tif err != nil {\n\t\treturn nil, err\n\t}\n",
    "#include <vector>\n\n#define MAX(a, b) ((a) > (b) ? (a) : (b))\n",
    "line one\nline two\n\nline four\n\n\nline seven",
    "windows\r\nline\r\nends\r\n\r\nhere",
    "old mac\rline\rends",
    "mixed\n\r\n\r\n\n\r ends",
    "- item 1\n- item 2\n  - item 2.1\n    - item 2.1.1\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "text \n trailing space before the break \n  two",
    "Question: 3 + 4 = ?\nAnswer: 7\n\nQuestion: 8 + 9 = ?\nAnswer:",
    "end!\n", "end!\n\n", "end.\r\n", "\nstart", "\n\nstart", "...\n\n...",
]

WHITESPACE = [
    "", " ", "  ", "   ", "        ", " " * 33, "\t", "\t\t\t", " \t \t ", "\n", "\n\n", "\n\n\n\n",
    "\r\n", "\r\n\r\n", "\r", " \n", "\n ", " \n \n ", "  \n\n  \n", "a ", "a  ", "a   ", " a", "  a",
    "   a", "a b", "a  b", "a   b", "a    b", "a\tb", "a\t\tb", "a \tb", "a\t b", "a\nb", "a \nb",
    "a\n b", "a\n\n b", "a  \n  b", "1 2", "1  2", "1   2", "! !", "!  !", "a\u00a0b", "a\u00a0\u00a0b",
    "a\u2003b", "a\u2009\u200ab", "a\u3000b", "a\u3000\u3000b", "a\u200bb", "a\u2028b", "a\u2029b",
    "a\u0085b", "a\ufeffb", "\ufeffBOM first", "a\u202fb", "a\u1680b", "a\u180eb", "a\u205fb",
    "a\x0bb\x0cc", "a\x1cb\x1dc\x1ed\x1fe", " leading and trailing ", "   three before, three after   ",
    "tabs\tbetween\twords\t", "many      spaces      between", "\u00a0", "\u3000", " \u00a0 ",
]

NUMBERS = [
    "0", "7", "42", "123", "1234", "12345", "123456", "1234567", "12345678901234567890", "1,234,567.89",
    "3.14159265358979", "-17", "+5", "1/2", "50%", "$19.99", "€5", "£3.50", "¥1000", "2+2=4", "12*12=144",
    "7 + 8 = 15", "99 - 100 = -1", "1st 2nd 3rd 4th", "2026-11-29T15:00:00Z", "192.168.0.1", "v1.2.3-rc4",
    "x1y22z333w4444", "007", "1e10", "²³¹ ₀₁₂ ½ ¾ Ⅳ ⅻ ① ㊿ ㉈", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "๐๑๒๓", "〇一二三",
    "１２３４５", "𝟎𝟏𝟐𝟑 𝟘𝟙 𝟬𝟭", "10 000 000", "3.000,50", "1²+2²=5",
]

EMOJI = [
    "😀", "😀😃😄", "Nice 😀!", "👍🏽", "👍🏻👍🏼👍🏽👍🏾👍🏿", "👨‍👩‍👧‍👦 family", "👩🏽‍💻 codes, 🧑‍🚀 flies", "🏳️‍🌈 🏴‍☠️", "🇩🇪🇫🇷🇯🇵",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "❤️ ❤ ♥︎", "1️⃣2️⃣#️⃣", "☺️😊", "a😀b", "😀 a", " 😀", "🤷🏿‍♀️...", "🦊jumps🐶", "✨ done ✅ fail ❌ ⚠️",
    "🫠🫶 newer", "text🙂🙃text",
]

COMBINING = [
    "cafe\u0301 café", "e\u0301e\u0300e\u0302", "n\u0303 ñ N\u0303 Ñ", "A\u030angstro\u0308m \u212b Å", "o\u0302\u0323 ộ ọ\u0302",
    "Z\u0351\u036b\u0343a\u0363\u0368l\u034eg\u0321o\u0322", "\u0301 starts with a mark", "a\u0301\u0301\u0301\u0301",
    "\u1100\u1161\u11a8 각 \u1112\u1161\u11ab", "か\u3099 が は\u309a ぱ", "क\u093c क़ \u0958", "\u2126 Ω \u00b5 μ \u212a K", "ﷺ ﷽ ｱﾞ",
    "i\u0307 İ ı\u0307", "s\u0323\u0307 ṩ s\u0307\u0323", "\u0344 \u0308\u0301", "na\u00efve nai\u0308ve", "\ufb1d \u05d9\u05b4",
    "\u1e9b\u0323 \u1e9b \u017f", "\u0f73 \u0f71\u0f72", "\uac00\u11a8 \uac01",
]

CONTROL = [
    "\x00", "a\x00b", "\x01\x02\x03", "bell\x07 back\x08 del\x7f", "esc \x1b[31mred\x1b[0m", "\x80\x81\x9f", "soft\u00adhyphen",
    "\u200e\u200f\u202a\u202c\u2066\u2069", "zero\u200cwidth\u200djoiners", "\ufffd replacement \ufffd\ufffd", "\ufffe\uffff nonchar",
    "\U0010ffff \U000e0001 \U000f0000", "\ue000\uf8ff private", "\u2060word\u2060joiner",
]

PLANES = [
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝓼𝓬𝓻𝓲𝓹𝓽 𝕕𝕠𝕦𝕓𝕝𝕖", "𐍈𐌰𐌹𐌻𐌰 𐎀𐎁𐎂", "𒀀𒁀 𓀀𓁀 𓃠", "𐤀𐤁𐤂 𐡀𐡁", "𝄞 𝅘𝅥𝅮 ♪♫", "🀄🂡🃏", "𠀀𠀁𪜀", "ᚠᚢᚦ ᛒᛖ", "𐐷𐑊𐐲 𐐏", "ꙮ ꜳ ꝏ",
    "⠃⠗⠇ ⟨⟩ ⌘⌥", "─│┌┐ █▓▒░ ■□▲", "„Anführung“ ‚einfach‘ «franz» ‹s›", "– — ― … ‰ † ‡ • ′ ″", "™ ® © ℃ № ℓ", "ǃKung ǂ ʻokina ʼ ˈiːpə",
]

SPECIAL = [
    "<|endoftext|>", "before<|endoftext|>after", "before <|endoftext|> after", "<|endoftext|><|endoftext|>",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>system\nBe brief.<|im_end|>\n",
    "<s>", "</s>", "<unk>", "a<s>b</s>c<unk>d", "<s> spaced </s>", "<s><s> twice", "<0x41>", "text <0x0A> byte", "<0xE2><0x82><0xAC>",
    "<|begin_of_text|>Hi<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", "<|endoftext", "|endoftext|>", "<|im_start|",
    "<mask>", "a <mask> b", "a  <mask>  b", "a<mask>b", "a \n<mask>\n b", "[RS]", "a [RS] b", "a[RS]  \n\tb", "[RS][RS] [RS]",
    "a [BOTH] b", "a  [BOTH]  b", "[BOTH] [BOTH]", "stretto", "a stretto b", "astrettob", "stretto1 _stretto stretto_ stretto-", "stretto,stretto",
    "éstretto strettoé", "STRETTO Stretto", "a NORM b", "NORMNORM", "a\u00a0<mask>\u00a0b", "cafe\u0301_tok café_tok", "xcafé_toky", "<tool_call>{\"a\": 1}</tool_call>",
    "<think>\nhm\n</think>\n\nok", "<|im_end|>\n", "▁already ▁meta▁space▁", "▁", "▁▁ ▁", "a▁b", "Ġalready Ċ byte Ġlevel", "Ġ", "ĊĊ",
    "longtok longtokens longtoken", "<|long|> <|longer|> <|long", "<|reserved_special_token_0|>x", " <s>", "<s> ", "  </s>  ",
]


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    lines = (ENGLISH + LATIN + CYRILLIC_GREEK + RTL + INDIC_THAI + CJK + CODE + MULTILINE + WHITESPACE +
             NUMBERS + EMOJI + COMBINING + CONTROL + PLANES + SPECIAL)
    lines = list(dict.fromkeys(lines))
    path = out / "tokenizers" / "corpus.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(json.dumps(line) for line in lines)
    path.write_text("[\n" + body + "\n]\n", encoding="ascii")
    print(f"{path.name}: {len(lines)} lines, {sum(len(s) for s in lines)} characters")


if __name__ == "__main__":
    main()
